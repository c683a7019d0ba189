variable "name" {
  type        = string
  description = "Name of the hosts, of their role and of their launch template."
}

variable "role" {
  type        = string
  description = "What runs on them: gateway, controller or worker."

  validation {
    condition     = contains(["gateway", "controller", "worker"], var.role)
    error_message = "role must be gateway, controller or worker."
  }
}

variable "ami_id" {
  type        = string
  description = "An Amazon Linux 2023 image; of workers, with the NVIDIA driver."

  validation {
    condition     = can(regex("^ami-[0-9a-f]+$", var.ami_id))
    error_message = "ami_id must look like ami-0123456789abcdef0."
  }
}

variable "instance_type" {
  type        = string
  description = "EC2 instance type; of a pool with several, the first."
}

variable "root_volume_gb" {
  type        = number
  default     = 20
  description = "Size of the root volume in GB."

  validation {
    condition     = var.root_volume_gb >= 8
    error_message = "root_volume_gb must be at least 8."
  }
}

variable "vpc_id" {
  type        = string
  description = "The VPC."
}

variable "queue" {
  type = object({
    redis_url                = string
    client_security_group_id = string
    client_statements = list(object({
      Sid      = string
      Effect   = string
      Action   = list(string)
      Resource = list(string)
    }))
  })
  description = "The outputs of the queue module."
}

variable "secrets" {
  type        = map(object({ id = string, arn = string }))
  default     = {}
  description = "Secrets Manager secrets by environment variable: read by the host at every start of its service, into memory."
}

variable "release" {
  type = object({
    bucket = string
    prefix = string
    digest = string
  })
  description = "Where the release lies, and the SHA-256 of its SHA256SUMS file."
}

variable "arguments" {
  type        = string
  description = "Arguments of the stoker command."
}

variable "environment" {
  type        = map(string)
  default     = {}
  description = "Environment of the service; never a secret."
}

variable "statements" {
  type = list(object({
    Sid       = string
    Effect    = string
    Action    = list(string)
    Resource  = list(string)
    Condition = optional(map(map(string)))
  }))
  default     = []
  description = "IAM statements of the role, besides those for its release, its log and the queue."
}

variable "log_group" {
  type = object({
    name = string
    arn  = string
  })
  description = "CloudWatch log group of the service."
}

variable "tags" {
  type        = map(string)
  description = "Tags of instances and volumes."
}
