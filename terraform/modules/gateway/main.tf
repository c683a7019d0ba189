locals {
  port = 8000
}

resource "aws_security_group" "balancer" {
  name        = "${var.name}-balancer"
  description = "Load balancer of ${var.name}"
  vpc_id      = var.vpc_id

  tags = { Name = "${var.name}-balancer" }
}

resource "aws_vpc_security_group_ingress_rule" "https" {
  for_each = toset(var.allowed_cidrs)

  security_group_id = aws_security_group.balancer.id
  description       = "Callers"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = each.value
}

# The load balancer has public addresses only, so calls from inside come through the NAT gateway.
resource "aws_vpc_security_group_ingress_rule" "workers" {
  security_group_id = aws_security_group.balancer.id
  description       = "Functions that call functions"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "${var.workers_address}/32"
}

resource "aws_vpc_security_group_egress_rule" "hosts" {
  #checkov:skip=CKV_AWS_23:Rules between groups have no description: the test server forgets it, and the plan would never be empty.
  security_group_id            = aws_security_group.balancer.id
  ip_protocol                  = "tcp"
  from_port                    = local.port
  to_port                      = local.port
  referenced_security_group_id = var.host.security_group_id
}

resource "aws_vpc_security_group_ingress_rule" "balancer" {
  #checkov:skip=CKV_AWS_23:Rules between groups have no description: the test server forgets it, and the plan would never be empty.
  security_group_id            = var.host.security_group_id
  ip_protocol                  = "tcp"
  from_port                    = local.port
  to_port                      = local.port
  referenced_security_group_id = aws_security_group.balancer.id
}

resource "aws_lb" "this" {
  #checkov:skip=CKV_AWS_91:Every request is in the gateway's own log with its request id; an access log needs one more bucket.
  #checkov:skip=CKV2_AWS_28:Who may call is allowed_cidrs and the gateway's API keys; a web firewall in front is the account's choice.
  #checkov:skip=CKV2_AWS_20:Port 80 is closed instead of redirected, so that no key is ever sent in the clear.
  name                       = var.name
  load_balancer_type         = "application"
  subnets                    = var.public_subnet_ids
  security_groups            = [aws_security_group.balancer.id]
  drop_invalid_header_fields = true
  enable_deletion_protection = var.deletion_protection

  # The longest a client waits for a cold start without a byte; streams send comments long before.
  idle_timeout = 900
}

resource "aws_lb_target_group" "this" {
  #checkov:skip=CKV_AWS_378:TLS ends at the load balancer; between it and the hosts the traffic stays in private subnets, open to it alone.
  name                 = var.name
  vpc_id               = var.vpc_id
  port                 = local.port
  protocol             = "HTTP"
  deregistration_delay = 60

  health_check {
    path                = "/readyz"
    interval            = 10
    timeout             = 5
    healthy_threshold   = 2
    unhealthy_threshold = 3
  }
}

resource "aws_lb_listener" "https" {
  load_balancer_arn = aws_lb.this.arn
  port              = 443
  protocol          = "HTTPS"
  ssl_policy        = "ELBSecurityPolicy-TLS13-1-2-2021-06"
  certificate_arn   = var.certificate_arn

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.this.arn
  }
}

# Metrics are for the inside.
resource "aws_lb_listener_rule" "metrics" {
  listener_arn = aws_lb_listener.https.arn
  priority     = 1

  condition {
    path_pattern {
      values = ["/metrics"]
    }
  }

  action {
    type = "fixed-response"

    fixed_response {
      content_type = "text/plain"
      status_code  = "404"
    }
  }
}

resource "aws_autoscaling_group" "this" {
  name                      = var.name
  min_size                  = var.hosts
  max_size                  = var.hosts + 1
  vpc_zone_identifier       = var.private_subnet_ids
  target_group_arns         = [aws_lb_target_group.this.arn]
  health_check_type         = "ELB"
  health_check_grace_period = 300
  wait_for_capacity_timeout = "0"
  enabled_metrics           = ["GroupDesiredCapacity", "GroupInServiceInstances"]

  launch_template {
    id      = var.host.launch_template.id
    version = var.host.launch_template.version
  }

  # A new release or setting replaces the hosts, each new one being healthy before an old one goes.
  instance_refresh {
    strategy = "Rolling"

    preferences {
      min_healthy_percentage = 100
      max_healthy_percentage = 200
    }
  }

  dynamic "tag" {
    for_each = merge(var.tags, { Name = var.name })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }
}
