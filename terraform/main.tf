data "aws_caller_identity" "current" {}
data "aws_region" "current" {}
data "aws_partition" "current" {}

data "aws_availability_zones" "available" {
  #checkov:skip=CKV_AWS_394:Only the first three are taken, and new zones come behind them; name zones to pin them.
  state = "available"

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

data "aws_ssm_parameter" "control_ami" {
  count = var.control_ami_id == null ? 1 : 0
  name  = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
}

data "aws_ssm_parameter" "worker_ami" {
  count = var.worker_ami_id == null ? 1 : 0
  name  = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
}

locals {
  account = data.aws_caller_identity.current.account_id
  region  = data.aws_region.current.name

  zones = length(var.zones) > 0 ? var.zones : slice(
    data.aws_availability_zones.available.names, 0, min(3, length(data.aws_availability_zones.available.names))
  )

  # insecure_value: an image's id is no secret, and a plan should show it.
  control_ami = coalesce(var.control_ami_id, one(data.aws_ssm_parameter.control_ami[*].insecure_value))
  worker_ami  = coalesce(var.worker_ami_id, one(data.aws_ssm_parameter.worker_ami[*].insecure_value))

  tags = merge(var.tags, { "stoker:cluster" = var.name })

  # Objects in the artifact bucket: store/ is STOKER_STORE, releases/ is what hosts install.
  store_arn = "${module.artifacts.arn}/store"

  release_digest = filesha256("${var.release_dir}/SHA256SUMS")
  release_prefix = "releases/${substr(local.release_digest, 0, 16)}"
  release = {
    bucket = module.artifacts.name
    # From the object, so that no host starts before its release is there.
    prefix = dirname(aws_s3_object.release["SHA256SUMS"].key)
    digest = local.release_digest
  }

  environment = {
    STOKER_CLUSTER = var.name
    STOKER_STORE   = "s3://${module.artifacts.name}/store"
  }

  group_arns = "arn:${data.aws_partition.current.partition}:autoscaling:${local.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/${var.name}-pool-*"

  roles = {
    gateway = {
      arguments = "gateway --host 0.0.0.0 --port 8000"
      statements = [
        { Sid = "Weights", Effect = "Allow", Action = ["s3:GetObject"], Resource = ["${module.weights.arn}/*"] },
        { Sid = "List", Effect = "Allow", Action = ["s3:ListBucket"], Resource = [module.weights.arn, module.artifacts.arn] },
        {
          Sid      = "Store"
          Effect   = "Allow"
          Action   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
          Resource = ["${local.store_arn}/*"]
        },
      ]
    }
    controller = {
      arguments = "controller --provider aws"
      statements = [
        { Sid = "List", Effect = "Allow", Action = ["s3:ListBucket"], Resource = [module.artifacts.arn] },
        { Sid = "Sweep", Effect = "Allow", Action = ["s3:DeleteObject"], Resource = ["${local.store_arn}/payloads/*", "${local.store_arn}/results/*", "${local.store_arn}/bundles/*"] },
        { Sid = "Usage", Effect = "Allow", Action = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"], Resource = ["${local.store_arn}/usage/*"] },
        {
          # These can't be limited to a group.
          Sid      = "Look"
          Effect   = "Allow"
          Action   = ["autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeScalingActivities"]
          Resource = ["*"]
        },
        {
          Sid    = "Scale"
          Effect = "Allow"
          Action = [
            "autoscaling:CompleteLifecycleAction",
            "autoscaling:SetDesiredCapacity",
            "autoscaling:SetInstanceProtection",
            "autoscaling:TerminateInstanceInAutoScalingGroup",
          ]
          Resource  = [local.group_arns]
          Condition = { StringEquals = { "aws:ResourceTag/stoker:cluster" = var.name } }
        },
      ]
    }
    worker = {
      arguments = "worker --provider aws"
      statements = [
        { Sid = "Weights", Effect = "Allow", Action = ["s3:GetObject"], Resource = ["${module.weights.arn}/*"] },
        { Sid = "List", Effect = "Allow", Action = ["s3:ListBucket"], Resource = [module.weights.arn, module.artifacts.arn] },
        { Sid = "Read", Effect = "Allow", Action = ["s3:GetObject"], Resource = ["${local.store_arn}/bundles/*", "${local.store_arn}/payloads/*"] },
        {
          # What they make: big results, and compiled kernels for the next start.
          Sid      = "Write"
          Effect   = "Allow"
          Action   = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"]
          Resource = ["${local.store_arn}/results/*", "${local.store_arn}/kernels/*"]
        },
      ]
    }
  }
}

module "network" {
  source = "./modules/network"

  name  = var.name
  cidr  = var.vpc_cidr
  zones = local.zones
}

module "weights" {
  source = "./modules/bucket"

  name                = "${var.name}-weights-${local.account}-${local.region}"
  deletion_protection = var.deletion_protection
}

module "artifacts" {
  source = "./modules/bucket"

  name                = "${var.name}-artifacts-${local.account}-${local.region}"
  deletion_protection = var.deletion_protection
}

# An older release stays in the bucket's history while hosts that were made for it are replaced.
resource "aws_s3_object" "release" {
  for_each = fileset(var.release_dir, "**")

  bucket      = module.artifacts.name
  key         = "${local.release_prefix}/${each.value}"
  source      = "${var.release_dir}/${each.value}"
  source_hash = filesha256("${var.release_dir}/${each.value}")

  checksum_algorithm = "SHA256"
}

module "secret" {
  source = "./modules/secret"

  name                = "${var.name}-key-seed"
  deletion_protection = var.deletion_protection
}

module "queue" {
  source = "./modules/queue"

  name                 = var.name
  vpc_id               = module.network.vpc_id
  subnet_ids           = slice(module.network.private_subnet_ids, 0, min(3, length(local.zones)))
  max_storage_gb       = var.queue_max_storage_gb
  redis_url_secret_arn = var.redis_url_secret_arn
  redis_port           = var.redis_port
}

module "gateway_host" {
  source = "./modules/host"

  name          = "${var.name}-gateway"
  role          = "gateway"
  ami_id        = local.control_ami
  instance_type = var.control_instance_type
  vpc_id        = module.network.vpc_id
  queue         = module.queue
  secrets       = merge(module.queue.secrets, { STOKER_SECRET = module.secret.reference })
  release       = local.release
  arguments     = local.roles.gateway.arguments
  environment   = local.environment
  statements    = local.roles.gateway.statements
  log_group     = module.observability.log_groups["gateway"]
  tags          = local.tags
}

module "gateway" {
  source = "./modules/gateway"

  name                = "${var.name}-gateway"
  vpc_id              = module.network.vpc_id
  public_subnet_ids   = module.network.public_subnet_ids
  private_subnet_ids  = module.network.private_subnet_ids
  host                = module.gateway_host
  hosts               = var.gateways
  certificate_arn     = var.certificate_arn
  allowed_cidrs       = var.allowed_cidrs
  workers_address     = module.network.outgoing_address
  deletion_protection = var.deletion_protection
  tags                = local.tags
}

module "controller_host" {
  source = "./modules/host"

  name          = "${var.name}-controller"
  role          = "controller"
  ami_id        = local.control_ami
  instance_type = var.control_instance_type
  vpc_id        = module.network.vpc_id
  queue         = module.queue
  secrets       = merge(module.queue.secrets, { STOKER_SECRET = module.secret.reference })
  release       = local.release
  arguments     = local.roles.controller.arguments
  environment   = local.environment
  statements    = local.roles.controller.statements
  log_group     = module.observability.log_groups["controller"]
  tags          = local.tags
}

module "controller" {
  source = "./modules/controller"

  name               = "${var.name}-controller"
  private_subnet_ids = module.network.private_subnet_ids
  launch_template    = module.controller_host.launch_template
  hosts              = var.controllers
  tags               = local.tags
}

module "worker_host" {
  source   = "./modules/host"
  for_each = var.gpu_pools

  name           = "${var.name}-pool-${each.key}"
  role           = "worker"
  ami_id         = local.worker_ami
  instance_type  = each.value.instance_types[0]
  root_volume_gb = each.value.root_volume_gb
  vpc_id         = module.network.vpc_id
  queue          = module.queue
  secrets        = merge(module.queue.secrets, { STOKER_SECRET = module.secret.reference })
  release        = local.release
  arguments      = local.roles.worker.arguments
  environment    = merge(local.environment, { STOKER_URL = "https://${var.domain}" })
  statements     = local.roles.worker.statements
  log_group      = module.observability.log_groups["worker"]
  tags           = local.tags
}

module "worker_pool" {
  source   = "./modules/worker_pool"
  for_each = var.gpu_pools

  cluster            = var.name
  pool               = each.key
  settings           = each.value
  private_subnet_ids = module.network.private_subnet_ids
  launch_template    = module.worker_host[each.key].launch_template
  tags               = local.tags
}

module "observability" {
  source = "./modules/observability"

  name               = var.name
  roles              = keys(local.roles)
  log_retention_days = var.log_retention_days
  alarm_topic_arns   = var.alarm_topic_arns
  balancer_metric    = module.gateway.balancer_metric
  target_metric      = module.gateway.target_metric
  controller_group   = module.controller.group_name
  cache_name         = module.queue.cache_name
  max_storage_gb     = var.queue_max_storage_gb
  pools = {
    for pool, settings in var.gpu_pools : pool => { groups = module.worker_pool[pool].group_names, max_hosts = settings.max_hosts }
  }
}
