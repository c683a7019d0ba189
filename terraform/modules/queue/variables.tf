variable "name" {
  type        = string
  description = "Name of the cache, of its user and of its user group."

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,38}[a-z0-9]$", var.name)) && !strcontains(var.name, "--")
    error_message = "name must be 2 to 40 lower-case letters, digits and single hyphens, and start with a letter."
  }
}

variable "vpc_id" {
  type        = string
  description = "The VPC."
}

variable "subnet_ids" {
  type        = list(string)
  description = "Two or three subnets in different zones."

  validation {
    condition     = length(var.subnet_ids) >= 2 && length(var.subnet_ids) <= 3
    error_message = "subnet_ids must name two or three subnets."
  }
}

variable "max_storage_gb" {
  type        = number
  description = "Storage above which the cache refuses or forgets, in GB: the bound of its cost."

  validation {
    condition     = var.max_storage_gb >= 1 && var.max_storage_gb <= 5000
    error_message = "max_storage_gb must be between 1 and 5000."
  }
}

variable "snapshot_days" {
  type        = number
  default     = 7
  description = "Days for which daily snapshots are kept."

  validation {
    condition     = var.snapshot_days >= 1 && var.snapshot_days <= 35
    error_message = "snapshot_days must be between 1 and 35."
  }
}

variable "redis_url_secret_arn" {
  type        = string
  default     = null
  description = "Secrets Manager secret that holds the URL of an own server; null makes a Valkey cache."

  validation {
    condition     = var.redis_url_secret_arn == null || can(regex("^arn:aws[a-z-]*:secretsmanager:", var.redis_url_secret_arn))
    error_message = "redis_url_secret_arn must be the ARN of a Secrets Manager secret, not the URL itself."
  }
}

variable "redis_port" {
  type        = number
  default     = 6379
  description = "Port of the server; hosts can connect to no other besides 443."

  validation {
    condition     = var.redis_port >= 1 && var.redis_port <= 65535
    error_message = "redis_port must be between 1 and 65535."
  }
}
