variable "name" {
  type        = string
  description = "Name of the load balancer and of the group."

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,30}[a-z0-9]$", var.name))
    error_message = "name must be 2 to 32 lower-case letters, digits and hyphens, which is what a load balancer takes."
  }
}

variable "vpc_id" {
  type        = string
  description = "The VPC."
}

variable "public_subnet_ids" {
  type        = list(string)
  description = "Subnets of the load balancer."
}

variable "private_subnet_ids" {
  type        = list(string)
  description = "Subnets of the hosts."
}

variable "host" {
  type = object({
    launch_template   = object({ id = string, version = string })
    security_group_id = string
  })
  description = "The outputs of the host module."
}

variable "hosts" {
  type        = number
  description = "Number of gateways."

  validation {
    condition     = var.hosts >= 1 && var.hosts <= 20 && floor(var.hosts) == var.hosts
    error_message = "hosts must be a whole number from 1 to 20."
  }
}

variable "certificate_arn" {
  type        = string
  description = "ACM certificate of the gateway's name."

  validation {
    condition     = can(regex("^arn:aws[a-z-]*:acm:", var.certificate_arn))
    error_message = "certificate_arn must be the ARN of an ACM certificate; nothing is served without TLS."
  }
}

variable "allowed_cidrs" {
  type        = list(string)
  description = "IPv4 ranges that may call the gateway."

  validation {
    condition     = length(var.allowed_cidrs) > 0 && alltrue([for range in var.allowed_cidrs : can(cidrnetmask(range))])
    error_message = "allowed_cidrs must be IPv4 ranges such as 203.0.113.0/24."
  }
}

variable "workers_address" {
  type        = string
  description = "The address from which workers call: functions call each other."
}

variable "deletion_protection" {
  type        = bool
  description = "Whether the load balancer can't be destroyed."
}

variable "tags" {
  type        = map(string)
  description = "Tags of the hosts."
}
