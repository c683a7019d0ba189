# Several pools, an own queue server, two of everything that answers, alarms, tags.

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
  region = "eu-central-1"

  default_tags {
    tags = { team = "inference" }
  }
}

variable "certificate_arn" {
  type        = string
  description = "ACM certificate of the name under which the gateway is called."
}

variable "zone_id" {
  type        = string
  description = "Route 53 zone of that name."
}

variable "domain" {
  type        = string
  description = "That name, such as llm.example.com."
}

variable "redis_url_secret_arn" {
  type        = string
  description = "Secrets Manager secret with the rediss:// URL of an own Valkey."
}

resource "aws_sns_topic" "alarms" {
  name              = "stoker-prod-alarms"
  kms_master_key_id = "alias/aws/sns"
}

module "stoker" {
  source = "../.."

  name            = "stoker-prod"
  release_dir     = "${path.module}/../../../dist/release"
  certificate_arn = var.certificate_arn
  domain          = var.domain
  allowed_cidrs   = ["203.0.113.0/24", "198.51.100.0/24"]
  zones           = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
  gateways        = 2
  controllers     = 2

  redis_url_secret_arn = var.redis_url_secret_arn
  log_retention_days   = 90
  alarm_topic_arns     = [aws_sns_topic.alarms.arn]
  tags                 = { team = "inference" }

  gpu_pools = {
    # Cheap and often away; its second group is on demand.
    l40s = {
      instance_types      = ["g6e.xlarge", "g6e.2xlarge", "g6e.4xlarge"]
      gpu                 = "L40S"
      price_per_hour      = 2.33
      spot                = true
      spot_price_per_hour = 1.10
      max_hosts           = 8
    }
    # Two stopped hosts with everything installed: a start is a boot, not an installation.
    a10g = {
      instance_types = ["g5.xlarge", "g5.2xlarge"]
      gpu            = "A10G"
      price_per_hour = 1.26
      max_hosts      = 4
      warm_hosts     = 2
    }
    h100 = {
      instance_types = ["p5.48xlarge"]
      gpu            = "H100"
      gpus           = 8
      price_per_hour = 55.04
      max_hosts      = 1
      boot_timeout_s = 1200
      root_volume_gb = 200
    }
  }
}

resource "aws_route53_record" "gateway" {
  zone_id = var.zone_id
  name    = var.domain
  type    = "A"

  alias {
    name                   = module.stoker.dns_name
    zone_id                = module.stoker.zone_id
    evaluate_target_health = true
  }
}

output "stoker" {
  description = "What you need next."
  value       = module.stoker
}
