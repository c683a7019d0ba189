variable "name" {
  type        = string
  description = "Name of the bucket; unique in all of AWS."

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.name))
    error_message = "name must be 3 to 63 lower-case letters, digits and hyphens."
  }
}

variable "keep_replaced_days" {
  type        = number
  default     = 30
  description = "Days for which replaced and deleted objects can be brought back."

  validation {
    condition     = var.keep_replaced_days >= 1
    error_message = "keep_replaced_days must be at least 1."
  }
}

variable "deletion_protection" {
  type        = bool
  default     = true
  description = "Whether a bucket with objects in it can't be destroyed."
}
