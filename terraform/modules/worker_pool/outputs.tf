output "group_names" {
  description = "Auto Scaling groups of the pool, the cheapest first."
  value       = [for group in aws_autoscaling_group.this : group.name]
}
