# Every module by itself, with a provider that makes nothing. (modules/secret can't be mocked: Terraform mocks no ephemeral resources.) Good values give what is promised, bad ones are refused.

mock_provider "aws" {
  override_during = plan
  mock_data "aws_region" {
    defaults = { name = "us-east-1" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_resource "aws_lb" {
    defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:loadbalancer/app/a/1", arn_suffix = "app/a/1" }
  }
  mock_resource "aws_lb_target_group" {
    defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:targetgroup/a/1", arn_suffix = "targetgroup/a/1" }
  }
  mock_resource "aws_lb_listener" {
    defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:listener/app/a/1/2" }
  }
  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }
  mock_resource "aws_elasticache_serverless_cache" {
    defaults = { endpoint = [{ address = "a.serverless.use1.cache.amazonaws.com", port = 6379 }] }
  }
}

# ---- network

run "network" {
  command = plan
  module {
    source = "./modules/network"
  }
  variables {
    name  = "a"
    cidr  = "10.0.0.0/16"
    zones = ["us-east-1a", "us-east-1b"]
  }
  assert {
    condition     = aws_subnet.public["us-east-1b"].cidr_block == "10.0.16.0/20" && aws_subnet.private["us-east-1a"].cidr_block == "10.0.128.0/20"
    error_message = "Each zone has a public and a private subnet."
  }
  assert {
    condition     = alltrue([for subnet in aws_subnet.public : subnet.map_public_ip_on_launch != true])
    error_message = "Nothing gets a public address by itself."
  }
  assert {
    condition     = aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway" && aws_vpc_endpoint.s3.service_name == "com.amazonaws.us-east-1.s3"
    error_message = "S3 is reached through a gateway endpoint."
  }
}

run "network_refuses_a_small_range_and_one_zone" {
  command = plan
  module {
    source = "./modules/network"
  }
  variables {
    name  = "a"
    cidr  = "10.0.0.0/24"
    zones = ["us-east-1a"]
  }
  expect_failures = [var.cidr, var.zones]
}

# ---- bucket

run "bucket" {
  command = plan
  module {
    source = "./modules/bucket"
  }
  variables {
    name = "a-weights"
  }
  assert {
    condition     = aws_s3_bucket.this.force_destroy == false && aws_s3_bucket_versioning.this.versioning_configuration[0].status == "Enabled"
    error_message = "What is in a bucket is neither destroyed with it nor lost when it is overwritten."
  }
  assert {
    condition     = jsondecode(aws_s3_bucket_policy.this.policy).Statement[0].Condition.Bool["aws:SecureTransport"] == "false"
    error_message = "Requests without TLS are denied."
  }
}

run "bucket_refuses_bad_values" {
  command = plan
  module {
    source = "./modules/bucket"
  }
  variables {
    name               = "A_Bucket"
    keep_replaced_days = 0
  }
  expect_failures = [var.name, var.keep_replaced_days]
}

# ---- queue

run "queue_valkey" {
  command = plan
  module {
    source = "./modules/queue"
  }
  variables {
    name           = "a1"
    vpc_id         = "vpc-1"
    subnet_ids     = ["subnet-1", "subnet-2"]
    max_storage_gb = 5
  }
  assert {
    condition     = output.redis_url == "rediss://a1@a.serverless.use1.cache.amazonaws.com:6379?iam=a1"
    error_message = "TLS, and no password in the URL."
  }
  assert {
    condition     = aws_elasticache_user.this[0].authentication_mode[0].type == "iam" && aws_elasticache_user.this[0].user_id == aws_elasticache_user.this[0].user_name
    error_message = "The user logs in with IAM, which asks for equal id and name."
  }
  assert {
    condition     = output.client_statements[0].Resource == ["arn:aws:elasticache:us-east-1:123456789012:serverlesscache:a1", "arn:aws:elasticache:us-east-1:123456789012:user:a1"]
    error_message = "A host may log in to this cache as this user only."
  }
  assert {
    condition     = aws_elasticache_serverless_cache.this[0].snapshot_retention_limit == 7 && aws_elasticache_serverless_cache.this[0].cache_usage_limits[0].data_storage[0].maximum == 5
    error_message = "Snapshots are kept, and the cost is bounded."
  }
  assert {
    condition     = length(output.secrets) == 0
    error_message = "There is no secret."
  }
}

run "queue_own_server" {
  command = plan
  module {
    source = "./modules/queue"
  }
  variables {
    name                 = "a2"
    vpc_id               = "vpc-1"
    subnet_ids           = ["subnet-1", "subnet-2"]
    max_storage_gb       = 5
    redis_url_secret_arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:redis-AbCdEf"
    redis_port           = 6380
  }
  assert {
    condition     = length(aws_elasticache_serverless_cache.this) == 0 && output.redis_url == "" && output.secrets.STOKER_REDIS.arn == var.redis_url_secret_arn
    error_message = "No cache is made, and hosts read the URL from the secret."
  }
  assert {
    condition     = aws_vpc_security_group_egress_rule.own_server[0].from_port == 6380
    error_message = "Hosts may connect to the server's port."
  }
}

run "queue_refuses_bad_values" {
  command = plan
  module {
    source = "./modules/queue"
  }
  variables {
    name                 = "A"
    vpc_id               = "vpc-1"
    subnet_ids           = ["subnet-1"]
    max_storage_gb       = 0
    snapshot_days        = 0
    redis_url_secret_arn = "rediss://user:password@host"
    redis_port           = 0
  }
  expect_failures = [var.name, var.subnet_ids, var.max_storage_gb, var.snapshot_days, var.redis_url_secret_arn, var.redis_port]
}

# ---- host

run "host" {
  command = plan
  module {
    source = "./modules/host"
  }
  variables {
    name          = "a-pool-l4"
    role          = "worker"
    ami_id        = "ami-0123456789abcdef0"
    instance_type = "g6.xlarge"
    vpc_id        = "vpc-1"
    queue = {
      redis_url                = "rediss://a@host:6379?iam=a"
      client_security_group_id = "sg-1"
      client_statements        = [{ Sid = "QueueLogin", Effect = "Allow", Action = ["elasticache:Connect"], Resource = ["arn:aws:elasticache:x"] }]
    }
    secrets     = { STOKER_SECRET = { id = "a-key-seed", arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:a-key-seed-??????" } }
    release     = { bucket = "artifacts", prefix = "releases/1", digest = "feed" }
    arguments   = "worker --provider aws"
    environment = { STOKER_CLUSTER = "a" }
    statements  = [{ Sid = "Weights", Effect = "Allow", Action = ["s3:GetObject"], Resource = ["arn:aws:s3:::weights/*"] }]
    log_group   = { name = "/stoker/a/worker", arn = "arn:aws:logs:us-east-1:123456789012:log-group:/stoker/a/worker" }
    tags        = { "stoker:cluster" = "a" }
  }
  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_tokens == "required" && aws_launch_template.this.metadata_options[0].http_put_response_hop_limit == 1
    error_message = "IMDSv2 only, and only from the host itself."
  }
  assert {
    condition     = aws_launch_template.this.block_device_mappings[0].ebs[0].encrypted == "true" && aws_launch_template.this.block_device_mappings[0].ebs[0].volume_type == "gp3"
    error_message = "The root volume is encrypted gp3."
  }
  assert {
    condition     = strcontains(output.user_data, "STOKER_REDIS=rediss://a@host:6379?iam=a") && strcontains(output.user_data, "STOKER_SECRET a-key-seed")
    error_message = "The host knows its queue, and where its secret is."
  }
  assert {
    condition     = toset([for statement in jsondecode(aws_iam_role_policy.this.policy).Statement : statement.Sid]) == toset(["Weights", "QueueLogin", "Secrets", "Release", "ReleaseList", "Log"])
    error_message = "Its role has what it was given, its release, its log, its secrets and the queue."
  }
}

run "host_refuses_bad_values" {
  command = plan
  module {
    source = "./modules/host"
  }
  variables {
    name           = "a"
    role           = "database"
    ami_id         = "newest"
    instance_type  = "t3.small"
    root_volume_gb = 1
    vpc_id         = "vpc-1"
    queue          = { redis_url = "", client_security_group_id = "sg-1", client_statements = [] }
    release        = { bucket = "artifacts", prefix = "releases/1", digest = "feed" }
    arguments      = ""
    log_group      = { name = "a", arn = "arn" }
    tags           = {}
  }
  expect_failures = [var.role, var.ami_id, var.root_volume_gb]
}

run "host_refuses_user_data_that_ec2_would_not_take" {
  command = plan
  module {
    source = "./modules/host"
  }
  variables {
    name          = "a"
    role          = "gateway"
    ami_id        = "ami-0123456789abcdef0"
    instance_type = "t3.small"
    vpc_id        = "vpc-1"
    queue         = { redis_url = "", client_security_group_id = "sg-1", client_statements = [] }
    release       = { bucket = "artifacts", prefix = "releases/1", digest = "feed" }
    arguments     = "gateway"
    environment   = { LONG = join("", [for n in range(1000) : "0123456789abcdef"]) }
    log_group     = { name = "a", arn = "arn" }
    tags          = {}
  }
  expect_failures = [aws_launch_template.this]
}

# ---- gateway

run "gateway" {
  command = plan
  module {
    source = "./modules/gateway"
  }
  variables {
    name                = "a-gateway"
    vpc_id              = "vpc-1"
    public_subnet_ids   = ["subnet-1", "subnet-2"]
    private_subnet_ids  = ["subnet-3", "subnet-4"]
    host                = { launch_template = { id = "lt-0123456789abcdef0", version = "3" }, security_group_id = "sg-1" }
    hosts               = 2
    certificate_arn     = "arn:aws:acm:us-east-1:123456789012:certificate/1"
    allowed_cidrs       = ["203.0.113.0/24", "198.51.100.7/32"]
    workers_address     = "198.51.100.8"
    deletion_protection = true
    tags                = { "stoker:cluster" = "a" }
  }
  assert {
    condition     = aws_lb_listener.https.protocol == "HTTPS" && strcontains(aws_lb_listener.https.ssl_policy, "TLS13")
    error_message = "TLS 1.2 or 1.3."
  }
  assert {
    condition     = toset(keys(aws_vpc_security_group_ingress_rule.https)) == toset(var.allowed_cidrs)
    error_message = "Open to the given ranges."
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.workers.cidr_ipv4 == "198.51.100.8/32"
    error_message = "And to functions that call functions."
  }
  assert {
    condition     = aws_lb.this.enable_deletion_protection && aws_autoscaling_group.this.min_size == 2 && aws_autoscaling_group.this.health_check_type == "ELB"
    error_message = "Protected, and gateways that don't answer are replaced."
  }
  assert {
    condition     = aws_lb_listener_rule.metrics.action[0].fixed_response[0].status_code == "404"
    error_message = "Metrics are not for the outside."
  }
}

run "gateway_refuses_bad_values" {
  command = plan
  module {
    source = "./modules/gateway"
  }
  variables {
    name                = "a-name-that-is-too-long-for-a-load-balancer"
    vpc_id              = "vpc-1"
    public_subnet_ids   = ["subnet-1", "subnet-2"]
    private_subnet_ids  = ["subnet-3", "subnet-4"]
    host                = { launch_template = { id = "lt-0123456789abcdef0", version = "3" }, security_group_id = "sg-1" }
    hosts               = 0
    certificate_arn     = ""
    allowed_cidrs       = []
    workers_address     = "198.51.100.8"
    deletion_protection = true
    tags                = {}
  }
  expect_failures = [var.name, var.hosts, var.certificate_arn, var.allowed_cidrs]
}

# ---- controller

run "controller" {
  command = plan
  module {
    source = "./modules/controller"
  }
  variables {
    name               = "a-controller"
    private_subnet_ids = ["subnet-3"]
    launch_template    = { id = "lt-0123456789abcdef0", version = "3" }
    tags               = { "stoker:cluster" = "a" }
  }
  assert {
    condition     = aws_autoscaling_group.this.min_size == 1 && aws_autoscaling_group.this.max_size == 2
    error_message = "One, and room for its successor."
  }
}

run "controller_refuses_three" {
  command = plan
  module {
    source = "./modules/controller"
  }
  variables {
    name               = "a-controller"
    private_subnet_ids = ["subnet-3"]
    launch_template    = { id = "lt-0123456789abcdef0", version = "3" }
    hosts              = 3
    tags               = {}
  }
  expect_failures = [var.hosts]
}

# ---- observability

run "observability" {
  command = plan
  module {
    source = "./modules/observability"
  }
  variables {
    name               = "a"
    roles              = ["gateway", "worker"]
    log_retention_days = 30
    alarm_topic_arns   = ["arn:aws:sns:us-east-1:123456789012:alarms"]
    balancer_metric    = "app/a/1"
    target_metric      = "targetgroup/a/1"
    controller_group   = "a-controller"
    pools              = { l4 = { groups = ["a-pool-l4", "a-pool-l4-on-demand"], max_hosts = 3 } }
    cache_name         = "a"
    max_storage_gb     = 5
  }
  assert {
    condition = toset(keys(aws_cloudwatch_metric_alarm.this)) == toset([
      "balancer-errors", "controller-down", "gateway-down", "gateway-errors", "pool-full-a-pool-l4", "pool-full-a-pool-l4-on-demand", "queue-filling", "queue-throttled",
    ])
    error_message = "Each part that can fail has its alarm."
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.this["queue-filling"].threshold == 2500000000 && aws_cloudwatch_metric_alarm.this["pool-full-a-pool-l4"].threshold == 2
    error_message = "Half of the cache; more than max_hosts - 1."
  }
  assert {
    condition     = alltrue([for alarm in aws_cloudwatch_metric_alarm.this : alarm.alarm_actions == toset(var.alarm_topic_arns)])
    error_message = "Every alarm tells the topics."
  }
  assert {
    condition     = length(jsondecode(aws_cloudwatch_dashboard.this.dashboard_body).widgets) == 6
    error_message = "Six pictures."
  }
}

run "observability_refuses_bad_values" {
  command = plan
  module {
    source = "./modules/observability"
  }
  variables {
    name               = "a"
    roles              = []
    log_retention_days = 31
    alarm_topic_arns   = ["alarms"]
    balancer_metric    = "app/a/1"
    target_metric      = "targetgroup/a/1"
    controller_group   = "a-controller"
    pools              = {}
    cache_name         = ""
    max_storage_gb     = 5
  }
  expect_failures = [var.log_retention_days, var.alarm_topic_arns]
}
