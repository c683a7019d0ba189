locals {
  on_demand = { purchase = "on-demand", price = var.settings.price_per_hour, min = var.settings.min_hosts }
  spot      = { purchase = "spot", price = var.settings.spot_price_per_hour, min = var.settings.min_hosts }

  # A group never goes from spot to on demand by itself when there is no spot capacity; the controller goes to the next group.
  groups = merge(
    { (var.pool) = var.settings.spot ? local.spot : local.on_demand },
    var.settings.spot && var.settings.on_demand_fallback ? { "${var.pool}-on-demand" = merge(local.on_demand, { min = 0 }) } : {},
  )

  # One type on demand needs no policy of mixed instances.
  plain = length(var.settings.instance_types) == 1 && !var.settings.spot
}

resource "aws_autoscaling_group" "this" {
  for_each = local.groups

  name                      = "${var.cluster}-pool-${each.key}"
  min_size                  = each.value.min
  max_size                  = var.settings.max_hosts
  vpc_zone_identifier       = var.private_subnet_ids
  health_check_type         = "EC2"
  health_check_grace_period = var.settings.boot_timeout_s
  wait_for_capacity_timeout = "0"
  enabled_metrics           = ["GroupDesiredCapacity", "GroupInServiceInstances"]

  # Which host goes is the controller's decision: never one that holds a lease.
  protect_from_scale_in = true

  dynamic "launch_template" {
    for_each = local.plain ? [var.launch_template] : []

    content {
      id      = launch_template.value.id
      version = launch_template.value.version
    }
  }

  dynamic "mixed_instances_policy" {
    for_each = local.plain ? [] : [each.value.purchase]

    content {
      instances_distribution {
        on_demand_percentage_above_base_capacity = mixed_instances_policy.value == "spot" ? 0 : 100
        on_demand_allocation_strategy            = "prioritized"
        spot_allocation_strategy                 = "price-capacity-optimized"
      }

      launch_template {
        launch_template_specification {
          launch_template_id = var.launch_template.id
          version            = var.launch_template.version
        }

        dynamic "override" {
          for_each = var.settings.instance_types

          content {
            instance_type = override.value
          }
        }
      }
    }
  }

  # Part of the group, so that it holds for the first host too. The agent drains, the controller completes the action.
  initial_lifecycle_hook {
    name                 = "stoker-drain"
    lifecycle_transition = "autoscaling:EC2_INSTANCE_TERMINATING"
    heartbeat_timeout    = 120
    default_result       = "CONTINUE"
  }

  dynamic "warm_pool" {
    for_each = var.settings.warm_hosts > 0 ? [var.settings.warm_hosts] : []

    content {
      pool_state                  = "Stopped"
      min_size                    = warm_pool.value
      max_group_prepared_capacity = var.settings.max_hosts

      instance_reuse_policy {
        reuse_on_scale_in = true
      }
    }
  }

  dynamic "tag" {
    for_each = merge(var.tags, {
      Name                    = "${var.cluster}-pool-${each.key}"
      "stoker:cluster"        = var.cluster
      "stoker:pool"           = each.key
      "stoker:purchase"       = each.value.purchase
      "stoker:gpu"            = var.settings.gpu
      "stoker:gpus"           = tostring(var.settings.gpus)
      "stoker:price-per-hour" = tostring(each.value.price)
      "stoker:boot-timeout-s" = tostring(var.settings.boot_timeout_s)
    })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  # How many there are is the controller's decision.
  lifecycle {
    ignore_changes = [desired_capacity]
  }
}
