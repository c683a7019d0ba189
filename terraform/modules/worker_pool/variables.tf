variable "cluster" {
  type        = string
  description = "Name of the deployment: the controller finds its pools by this tag."
}

variable "pool" {
  type        = string
  description = "Name of the pool."

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,22}[a-z0-9]$", var.pool)) && !endswith(var.pool, "-on-demand")
    error_message = "pool must be 2 to 24 lower-case letters, digits and hyphens, and not end in -on-demand."
  }
}

variable "settings" {
  type = object({
    instance_types      = list(string)
    gpu                 = string
    gpus                = number
    price_per_hour      = number
    min_hosts           = optional(number, 0)
    max_hosts           = number
    spot                = optional(bool, false)
    spot_price_per_hour = optional(number)
    on_demand_fallback  = optional(bool, true)
    warm_hosts          = optional(number, 0)
    boot_timeout_s      = optional(number, 600)
  })
  description = "What the pool consists of; see the root module's gpu_pools."

  validation {
    condition     = length(var.settings.instance_types) >= 1 && length(var.settings.instance_types) <= 40
    error_message = "instance_types must name 1 to 40 types, the preferred first."
  }

  validation {
    condition     = alltrue([for type in var.settings.instance_types : can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", type))])
    error_message = "instance_types must look like g6e.xlarge."
  }

  validation {
    condition     = var.settings.min_hosts >= 0 && var.settings.max_hosts >= 1 && var.settings.min_hosts <= var.settings.max_hosts
    error_message = "0 <= min_hosts <= max_hosts and max_hosts >= 1 must hold."
  }

  validation {
    condition     = var.settings.gpus >= 0 && var.settings.price_per_hour > 0
    error_message = "gpus can't be negative, and price_per_hour must be above 0: the policy weighs it."
  }

  validation {
    condition     = !(var.settings.spot && var.settings.warm_hosts > 0)
    error_message = "A pool is spot or has warm_hosts, not both: a stopped spot host may not come back."
  }

  validation {
    condition     = var.settings.warm_hosts >= 0 && var.settings.warm_hosts <= var.settings.max_hosts
    error_message = "warm_hosts must be between 0 and max_hosts."
  }

  validation {
    condition     = !var.settings.spot || var.settings.spot_price_per_hour != null
    error_message = "A spot pool needs spot_price_per_hour, an estimate: the policy weighs it."
  }

  validation {
    condition     = var.settings.boot_timeout_s >= 60
    error_message = "boot_timeout_s must be at least 60."
  }
}

variable "private_subnet_ids" {
  type        = list(string)
  description = "Subnets of the hosts."
}

variable "launch_template" {
  type        = object({ id = string, version = string })
  description = "Output of the host module."
}

variable "tags" {
  type        = map(string)
  description = "Tags of the hosts."
}
