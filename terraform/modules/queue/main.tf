data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  own = var.redis_url_secret_arn != null

  # Known before the cache exists, so that a plan shows every policy.
  arns = [for kind in ["serverlesscache", "user"] :
    "arn:${data.aws_partition.current.partition}:elasticache:${data.aws_region.current.name}:${data.aws_caller_identity.current.account_id}:${kind}:${var.name}"
  ]
}

# Hosts wear it; what the cache lets in, and where hosts may go for it, is written down by this group.
resource "aws_security_group" "clients" {
  #checkov:skip=CKV2_AWS_5:Launch templates of hosts wear it, in another module.
  name        = "${var.name}-queue-clients"
  description = "Hosts that may reach the queue"
  vpc_id      = var.vpc_id

  tags = { Name = "${var.name}-queue-clients" }
}

resource "aws_vpc_security_group_egress_rule" "own_server" {
  count = local.own ? 1 : 0

  security_group_id = aws_security_group.clients.id
  description       = "Own queue server"
  ip_protocol       = "tcp"
  from_port         = var.redis_port
  to_port           = var.redis_port
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_security_group" "cache" {
  count = local.own ? 0 : 1

  name        = "${var.name}-queue"
  description = "The queue cache"
  vpc_id      = var.vpc_id

  tags = { Name = "${var.name}-queue" }
}

resource "aws_vpc_security_group_egress_rule" "cache" {
  #checkov:skip=CKV_AWS_23:Rules between groups have no description: the test server forgets it, and the plan would never be empty.
  count = local.own ? 0 : 1

  security_group_id            = aws_security_group.clients.id
  ip_protocol                  = "tcp"
  from_port                    = 6379
  to_port                      = 6379
  referenced_security_group_id = aws_security_group.cache[0].id
}

resource "aws_vpc_security_group_ingress_rule" "cache" {
  #checkov:skip=CKV_AWS_23:Rules between groups have no description: the test server forgets it, and the plan would never be empty.
  count = local.own ? 0 : 1

  security_group_id            = aws_security_group.cache[0].id
  ip_protocol                  = "tcp"
  from_port                    = 6379
  to_port                      = 6379
  referenced_security_group_id = aws_security_group.clients.id
}

# Hosts log in with a signed, short-lived token of their role: there is no password to keep.
resource "aws_elasticache_user" "this" {
  count = local.own ? 0 : 1

  user_id       = var.name
  user_name     = var.name
  engine        = "valkey"
  access_string = "on ~stoker:* &stoker:* +@all -@admin -@dangerous +info"

  authentication_mode {
    type = "iam"
  }
}

resource "aws_elasticache_user_group" "this" {
  count = local.own ? 0 : 1

  user_group_id = var.name
  engine        = "valkey"
  user_ids      = [aws_elasticache_user.this[0].user_id]
}

resource "aws_elasticache_serverless_cache" "this" {
  count = local.own ? 0 : 1

  name                     = var.name
  description              = "Queue of ${var.name}"
  engine                   = "valkey"
  major_engine_version     = "8"
  subnet_ids               = var.subnet_ids
  security_group_ids       = [aws_security_group.cache[0].id]
  user_group_id            = aws_elasticache_user_group.this[0].user_group_id
  snapshot_retention_limit = var.snapshot_days
  daily_snapshot_time      = "04:00"

  cache_usage_limits {
    data_storage {
      maximum = var.max_storage_gb
      unit    = "GB"
    }
  }
}
