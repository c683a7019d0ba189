variable "name" {
  type        = string
  description = "Name of the deployment: prefix of all names, and the tag by which the controller finds its pools."

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,18}[a-z0-9]$", var.name)) && !strcontains(var.name, "--")
    error_message = "name must be 2 to 20 lower-case letters, digits and single hyphens, and start with a letter."
  }
}

variable "release_dir" {
  type        = string
  description = "Folder with the release that `make wheel` built."

  validation {
    condition     = fileexists("${var.release_dir}/SHA256SUMS")
    error_message = "There is no SHA256SUMS in release_dir: run `make wheel` and name its dist/release."
  }
}

variable "certificate_arn" {
  type        = string
  description = "ACM certificate of the name under which the gateway is called."
}

variable "domain" {
  type        = string
  description = "Name under which the gateway is called, such as llm.example.com: the certificate is for it, and it points at dns_name. Functions call each other there."

  validation {
    condition     = can(regex("^([a-z0-9]([a-z0-9-]*[a-z0-9])?\\.)+[a-z]{2,}$", var.domain))
    error_message = "domain must be a name such as llm.example.com, without https:// and without a path."
  }
}

variable "allowed_cidrs" {
  type        = list(string)
  description = "IPv4 ranges that may call the gateway."
}

variable "gpu_pools" {
  type = map(object({
    instance_types      = list(string)
    gpu                 = string
    gpus                = optional(number, 1)
    price_per_hour      = number
    min_hosts           = optional(number, 0)
    max_hosts           = optional(number, 4)
    spot                = optional(bool, false)
    spot_price_per_hour = optional(number)
    on_demand_fallback  = optional(bool, true)
    warm_hosts          = optional(number, 0)
    boot_timeout_s      = optional(number, 600)
    root_volume_gb      = optional(number, 100)
  }))
  description = "Worker pools by name: instance types (the preferred first, all with the same GPUs), the GPU as functions ask for it, GPUs per host, USD per host-hour, bounds, spot (with an estimate of its price, and a second group on demand for when there is none), stopped hosts kept warm, seconds until a host that doesn't report is replaced."

  validation {
    condition     = length(var.gpu_pools) >= 1
    error_message = "gpu_pools must have at least one pool."
  }
}

variable "vpc_cidr" {
  type        = string
  default     = "10.64.0.0/16"
  description = "IPv4 range of the VPC."
}

variable "zones" {
  type        = list(string)
  default     = []
  description = "Availability zones; empty takes the region's first three."
}

variable "gateways" {
  type        = number
  default     = 1
  description = "Number of gateways."
}

variable "controllers" {
  type        = number
  default     = 1
  description = "1, or 2 for a take-over within seconds."
}

variable "control_instance_type" {
  type        = string
  default     = "t3.small"
  description = "EC2 instance type of gateways and controllers."
}

variable "control_ami_id" {
  type        = string
  default     = null
  description = "Image of gateways and controllers; null takes the newest Amazon Linux 2023."
}

variable "worker_ami_id" {
  type        = string
  default     = null
  description = "Image of workers; null takes AWS's newest base image with the NVIDIA driver on Amazon Linux 2023."
}

variable "redis_url_secret_arn" {
  type        = string
  default     = null
  description = "Secrets Manager secret with the redis:// or rediss:// URL of an own server; null makes an ElastiCache Serverless Valkey cache."
}

variable "redis_port" {
  type        = number
  default     = 6379
  description = "Port of the own server."
}

variable "queue_max_storage_gb" {
  type        = number
  default     = 5
  description = "Storage limit of the cache in GB."
}

variable "deletion_protection" {
  type        = bool
  default     = true
  description = "Whether the load balancer, and buckets with objects in them, can't be destroyed."
}

variable "log_retention_days" {
  type        = number
  default     = 30
  description = "Days for which logs are kept."
}

variable "alarm_topic_arns" {
  type        = list(string)
  default     = []
  description = "SNS topics that are told of alarms."
}

variable "tags" {
  type        = map(string)
  default     = {}
  description = "Tags of every host, volume and group; set those of all other resources with the provider's default_tags."

  validation {
    condition     = alltrue([for key, _ in var.tags : !startswith(key, "stoker:") && key != "Name"])
    error_message = "tags can't set Name or keys that begin with stoker:."
  }

  validation {
    condition     = alltrue([for key, _ in var.tags : can(regex("^[A-Za-z0-9+=.,_:@-]+$", key))])
    error_message = "Keys of tags may have letters, digits and + - = . , _ : @ only: workers read their tags from instance metadata."
  }
}
