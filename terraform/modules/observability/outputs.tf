output "log_groups" {
  description = "Log group of each role."
  value       = { for role, group in aws_cloudwatch_log_group.this : role => { name = group.name, arn = "${local.log_arn}:${group.name}" } }
}

output "dashboard_url" {
  description = "The dashboard in the console."
  value       = "https://console.aws.amazon.com/cloudwatch/home?region=${local.region}#dashboards/dashboard/${aws_cloudwatch_dashboard.this.dashboard_name}"
}
