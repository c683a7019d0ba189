variable "name" {
  type        = string
  description = "Name of the group."
}

variable "private_subnet_ids" {
  type        = list(string)
  description = "Subnets of the host."
}

variable "launch_template" {
  type        = object({ id = string, version = string })
  description = "Output of the host module."
}

variable "hosts" {
  type        = number
  default     = 1
  description = "One controller acts, a second takes over within seconds."

  validation {
    condition     = contains([1, 2], var.hosts)
    error_message = "hosts must be 1 or 2."
  }
}

variable "tags" {
  type        = map(string)
  description = "Tags of the host."
}
