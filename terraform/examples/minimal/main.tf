# The least: one pool of one kind of GPU, everything else as it comes.
#
#   make wheel
#   cd terraform/examples/minimal && terraform init && terraform apply

terraform {
  required_version = ">= 1.11"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 6.0"
    }
  }
}

provider "aws" {
  region = var.region
}

variable "region" {
  type        = string
  default     = "us-east-1"
  description = "AWS region."
}

variable "certificate_arn" {
  type        = string
  description = "ACM certificate of the name under which the gateway is called."
}

variable "domain" {
  type        = string
  description = "That name, such as llm.example.com: point it at the output dns_name."
}

variable "allowed_cidrs" {
  type        = list(string)
  description = "IPv4 ranges that may call the gateway."
}

variable "worker_ami_id" {
  type        = string
  default     = null
  description = "Image of workers; null takes AWS's newest base image with the NVIDIA driver."
}

module "stoker" {
  source = "../.."

  name            = "stoker"
  release_dir     = "${path.module}/../../../dist/release"
  certificate_arn = var.certificate_arn
  domain          = var.domain
  allowed_cidrs   = var.allowed_cidrs
  worker_ami_id   = var.worker_ami_id

  gpu_pools = {
    l4 = {
      instance_types = ["g6.xlarge"]
      gpu            = "L4"
      price_per_hour = 0.80
      max_hosts      = 2
    }
  }
}

output "stoker" {
  description = "What you need next."
  value       = module.stoker
}
