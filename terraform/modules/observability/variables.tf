variable "name" {
  type        = string
  description = "Prefix of all names."
}

variable "roles" {
  type        = set(string)
  description = "Roles that write a log."
}

variable "log_retention_days" {
  type        = number
  description = "Days for which logs are kept."

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653], var.log_retention_days)
    error_message = "log_retention_days must be one of CloudWatch's: 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, ..."
  }
}

variable "alarm_topic_arns" {
  type        = list(string)
  description = "SNS topics that are told of alarms."

  validation {
    condition     = alltrue([for arn in var.alarm_topic_arns : can(regex("^arn:aws[a-z-]*:sns:", arn))])
    error_message = "alarm_topic_arns must be ARNs of SNS topics."
  }
}

variable "balancer_metric" {
  type        = string
  description = "The load balancer in CloudWatch."
}

variable "target_metric" {
  type        = string
  description = "The gateways in CloudWatch."
}

variable "controller_group" {
  type        = string
  description = "Auto Scaling group of the controller."
}

variable "pools" {
  type        = map(object({ groups = list(string), max_hosts = number }))
  description = "Worker pools and their Auto Scaling groups."
}

variable "cache_name" {
  type        = string
  description = "The queue's cache; empty for an own server."
}

variable "max_storage_gb" {
  type        = number
  description = "Storage limit of the cache in GB."
}
