output "group_name" {
  description = "Auto Scaling group of the controller."
  value       = aws_autoscaling_group.this.name
}
