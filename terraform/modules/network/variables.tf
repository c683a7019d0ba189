variable "name" {
  type        = string
  description = "Prefix of all names."
}

variable "cidr" {
  type        = string
  description = "IPv4 range of the VPC, a /16 to /20: each zone gets two of sixteen parts."

  validation {
    condition     = can(cidrnetmask(var.cidr)) && tonumber(try(split("/", var.cidr)[1], 0)) >= 16 && tonumber(try(split("/", var.cidr)[1], 99)) <= 20
    error_message = "cidr must be an IPv4 range between /16 and /20, such as 10.64.0.0/16."
  }
}

variable "zones" {
  type        = list(string)
  description = "Availability zones, two to six. The load balancer and the queue need two; more zones find more GPUs."

  validation {
    condition     = length(var.zones) >= 2 && length(var.zones) <= 6 && length(distinct(var.zones)) == length(var.zones)
    error_message = "zones must name two to six different availability zones."
  }
}
