resource "aws_autoscaling_group" "this" {
  name                      = var.name
  min_size                  = var.hosts
  max_size                  = var.hosts + 1
  vpc_zone_identifier       = var.private_subnet_ids
  health_check_type         = "EC2"
  health_check_grace_period = 300
  wait_for_capacity_timeout = "0"
  enabled_metrics           = ["GroupDesiredCapacity", "GroupInServiceInstances"]

  launch_template {
    id      = var.launch_template.id
    version = var.launch_template.version
  }

  # The new controller waits for the old one's lease: there is never more than one that acts.
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
