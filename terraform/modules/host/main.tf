data "aws_region" "current" {}
data "aws_partition" "current" {}

locals {
  region = data.aws_region.current.name

  environment = merge({
    AWS_REGION         = local.region
    AWS_DEFAULT_REGION = local.region
    STOKER_DATA        = "/var/lib/stoker"
  }, var.queue.redis_url == "" ? {} : { STOKER_REDIS = var.queue.redis_url }, var.environment)

  bootstrap = {
    ROLE           = var.role
    SERVICE_USER   = local.user
    RELEASE_URL    = "s3://${var.release.bucket}/${var.release.prefix}"
    RELEASE_DIGEST = var.release.digest
    LOG_GROUP      = var.log_group.name
  }

  secrets = join("", [for variable, secret in var.secrets : "${variable} ${secret.id}\n"])

  # A worker starts functions as users of their own, for which it must be root; nothing else needs to be.
  is_worker     = var.role == "worker"
  user          = local.is_worker ? "root" : "stoker"
  function_uids = "1900000000-1900004095"

  files = {
    "/etc/stoker/secrets"       = { mode = "0644", content = local.secrets }
    "/etc/stoker/stoker.env"    = { mode = "0644", content = join("", [for key, value in local.environment : "${key}=${value}\n"]) }
    "/etc/stoker/bootstrap.env" = { mode = "0644", content = join("", [for key, value in local.bootstrap : "${key}=${value}\n"]) }
    "/etc/systemd/system/stoker.service" = {
      mode = "0644"
      content = templatefile("${path.module}/files/stoker.service.tftpl", {
        role          = var.role
        arguments     = var.arguments
        user          = local.user
        function_uids = local.function_uids
      })
    }
    "/etc/logrotate.d/stoker"       = { mode = "0644", content = file("${path.module}/files/logrotate") }
    "/opt/stoker/log-agent.json"    = { mode = "0644", content = templatefile("${path.module}/files/log-agent.json.tftpl", { log_group = var.log_group.name }) }
    "/usr/local/bin/stoker-boot"    = { mode = "0755", content = file("${path.module}/files/boot.sh") }
    "/usr/local/bin/stoker-disk"    = { mode = "0755", content = file("${path.module}/files/disk.sh") }
    "/usr/local/bin/stoker-secrets" = { mode = "0755", content = file("${path.module}/files/secrets.sh") }
  }

  worker_files = {
    "/usr/local/bin/stoker-metadata" = { mode = "0755", content = file("${path.module}/files/metadata.sh") }
  }

  user_data = join("\n", ["#cloud-config", jsonencode({
    write_files = [for path, file in merge(local.files, local.is_worker ? local.worker_files : {}) : { path = path, permissions = file.mode, content = file.content }]
    runcmd      = [["/usr/local/bin/stoker-boot"]]
  }), ""])

  secret_statements = length(var.secrets) == 0 ? [] : [{
    Sid      = "Secrets"
    Effect   = "Allow"
    Action   = ["secretsmanager:GetSecretValue"]
    Resource = [for secret in var.secrets : secret.arn]
  }]

  statements = concat(var.statements, var.queue.client_statements, local.secret_statements, [
    {
      Sid      = "Release"
      Effect   = "Allow"
      Action   = ["s3:GetObject"]
      Resource = ["arn:${data.aws_partition.current.partition}:s3:::${var.release.bucket}/${var.release.prefix}/*"]
    },
    {
      Sid      = "ReleaseList"
      Effect   = "Allow"
      Action   = ["s3:ListBucket"]
      Resource = ["arn:${data.aws_partition.current.partition}:s3:::${var.release.bucket}"]
    },
    {
      Sid      = "Log"
      Effect   = "Allow"
      Action   = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
      Resource = ["${var.log_group.arn}:*"]
    },
  ])
}

resource "aws_iam_role" "this" {
  name = var.name

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "this" {
  name = "stoker"
  role = aws_iam_role.this.id

  policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [for statement in local.statements : { for key, value in statement : key => value if value != null }]
  })
}

resource "aws_iam_instance_profile" "this" {
  name = var.name
  role = aws_iam_role.this.name
}

resource "aws_security_group" "this" {
  name        = var.name
  description = "Hosts of ${var.name}"
  vpc_id      = var.vpc_id

  tags = { Name = var.name }
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.this.id
  description       = "AWS, package indexes, what functions call"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_launch_template" "this" {
  name                   = var.name
  update_default_version = true
  image_id               = var.ami_id
  instance_type          = var.instance_type
  user_data              = base64encode(local.user_data)
  vpc_security_group_ids = [aws_security_group.this.id, var.queue.client_security_group_id]

  iam_instance_profile {
    name = aws_iam_instance_profile.this.name
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    http_protocol_ipv6          = "disabled"
    instance_metadata_tags      = local.is_worker ? "enabled" : "disabled"
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.root_volume_gb
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume"]

    content {
      resource_type = tag_specifications.value
      tags          = merge(var.tags, { Name = var.name })
    }
  }

  lifecycle {
    precondition {
      condition     = length(local.user_data) <= 16384
      error_message = "The environment is too long for EC2 user data (16 KB)."
    }
  }
}
