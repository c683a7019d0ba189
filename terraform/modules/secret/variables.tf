variable "name" {
  type        = string
  description = "Name of the secret."

  validation {
    condition     = can(regex("^[A-Za-z0-9/_-]{1,200}$", var.name)) && !can(regex("-[A-Za-z0-9]{6}$", var.name))
    error_message = "name must be letters, digits, '/', '_' and '-', and not end in '-' and six of them, which AWS would confuse with its own suffix."
  }
}

variable "deletion_protection" {
  type        = bool
  default     = true
  description = "Whether the secret can be brought back for 30 days after it was destroyed."
}
