data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  region = data.aws_region.current.name

  # Known before the groups exist, so that a plan shows every policy.
  log_arn = "arn:${data.aws_partition.current.partition}:logs:${local.region}:${data.aws_caller_identity.current.account_id}:log-group"

  pool_groups = merge([for pool in var.pools : { for group in pool.groups : group => pool.max_hosts }]...)

  balancer = { LoadBalancer = var.balancer_metric }
  targets  = { LoadBalancer = var.balancer_metric, TargetGroup = var.target_metric }

  alarms = merge(
    {
      gateway-down = {
        text      = "A gateway does not answer its health check."
        namespace = "AWS/ApplicationELB", metric = "UnHealthyHostCount", dimensions = local.targets
        statistic = "Maximum", threshold = 0, period = 60, periods = 3, missing = "notBreaching", less = false
      }
      gateway-errors = {
        text      = "Gateways answer with 5xx."
        namespace = "AWS/ApplicationELB", metric = "HTTPCode_Target_5XX_Count", dimensions = local.balancer
        statistic = "Sum", threshold = 10, period = 60, periods = 3, missing = "notBreaching", less = false
      }
      balancer-errors = {
        text      = "The load balancer finds no gateway that answers."
        namespace = "AWS/ApplicationELB", metric = "HTTPCode_ELB_5XX_Count", dimensions = local.balancer
        statistic = "Sum", threshold = 10, period = 60, periods = 3, missing = "notBreaching", less = false
      }
      controller-down = {
        text      = "No controller runs: nothing wakes from zero."
        namespace = "AWS/AutoScaling", metric = "GroupInServiceInstances", dimensions = { AutoScalingGroupName = var.controller_group }
        statistic = "Minimum", threshold = 1, period = 60, periods = 5, missing = "breaching", less = true
      }
    },
    {
      for group, max_hosts in local.pool_groups : "pool-full-${group}" => {
        text      = "${group} has been at its max_hosts for an hour."
        namespace = "AWS/AutoScaling", metric = "GroupDesiredCapacity", dimensions = { AutoScalingGroupName = group }
        statistic = "Minimum", threshold = max_hosts - 1, period = 300, periods = 12, missing = "notBreaching", less = false
      }
    },
    var.cache_name == "" ? {} : {
      queue-filling = {
        text      = "The queue's cache is more than half full; at its limit it forgets results before their time."
        namespace = "AWS/ElastiCache", metric = "BytesUsedForCache", dimensions = { CacheName = var.cache_name }
        statistic = "Maximum", threshold = var.max_storage_gb * 500000000, period = 60, periods = 3, missing = "notBreaching", less = false
      }
      queue-throttled = {
        text      = "The queue's cache refuses commands."
        namespace = "AWS/ElastiCache", metric = "ThrottledCmds", dimensions = { CacheName = var.cache_name }
        statistic = "Sum", threshold = 0, period = 60, periods = 3, missing = "notBreaching", less = false
      }
    },
  )

  widgets = concat(
    [
      { title = "Requests", metrics = [["AWS/ApplicationELB", "RequestCount", "LoadBalancer", var.balancer_metric, { stat = "Sum" }]] },
      { title = "Response time", metrics = [for stat in ["p50", "p99"] : ["AWS/ApplicationELB", "TargetResponseTime", "LoadBalancer", var.balancer_metric, { stat = stat }]] },
      { title = "Errors", metrics = [for code in ["4XX", "5XX"] : ["AWS/ApplicationELB", "HTTPCode_Target_${code}_Count", "LoadBalancer", var.balancer_metric, { stat = "Sum" }]] },
      { title = "Hosts wanted", metrics = [for group, _ in local.pool_groups : ["AWS/AutoScaling", "GroupDesiredCapacity", "AutoScalingGroupName", group]] },
      { title = "Hosts in service", metrics = [for group, _ in local.pool_groups : ["AWS/AutoScaling", "GroupInServiceInstances", "AutoScalingGroupName", group]] },
    ],
    var.cache_name == "" ? [] : [
      { title = "Queue", metrics = [for metric in ["BytesUsedForCache", "ElastiCacheProcessingUnits", "CurrConnections"] : ["AWS/ElastiCache", metric, "CacheName", var.cache_name]] },
    ],
  )
}

resource "aws_cloudwatch_log_group" "this" {
  #checkov:skip=CKV_AWS_158:CloudWatch encrypts logs with its own key; a customer key is a price per month for no other reader.
  #checkov:skip=CKV_AWS_338:How long logs are kept is log_retention_days; a year by default would cost more than the idle system.
  for_each = var.roles

  name              = "/stoker/${var.name}/${each.key}"
  retention_in_days = var.log_retention_days
}

resource "aws_cloudwatch_metric_alarm" "this" {
  for_each = local.alarms

  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = each.value.text
  namespace           = each.value.namespace
  metric_name         = each.value.metric
  dimensions          = each.value.dimensions
  statistic           = each.value.statistic
  comparison_operator = each.value.less ? "LessThanThreshold" : "GreaterThanThreshold"
  threshold           = each.value.threshold
  period              = each.value.period
  evaluation_periods  = each.value.periods
  treat_missing_data  = each.value.missing
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns
}

resource "aws_cloudwatch_dashboard" "this" {
  dashboard_name = var.name

  dashboard_body = jsonencode({
    widgets = [for index, widget in local.widgets : {
      type   = "metric"
      x      = index % 3 * 8
      y      = floor(index / 3) * 6
      width  = 8
      height = 6
      properties = {
        title   = widget.title
        region  = local.region
        view    = "timeSeries"
        period  = 60
        metrics = widget.metrics
      }
    }]
  })
}
