variable "name" {
  type        = string
  description = "Name of the secret."
}

variable "deletion_protection" {
  type        = bool
  default     = true
  description = "Whether the secret can be brought back for 30 days after it was destroyed."
}
