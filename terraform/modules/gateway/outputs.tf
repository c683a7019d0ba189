output "dns_name" {
  description = "Name of the load balancer: what your domain points at."
  value       = aws_lb.this.dns_name
}

output "zone_id" {
  description = "Route 53 zone of the load balancer, for an alias record."
  value       = aws_lb.this.zone_id
}

output "balancer_metric" {
  description = "The load balancer in CloudWatch."
  value       = aws_lb.this.arn_suffix
}

output "target_metric" {
  description = "The gateways in CloudWatch."
  value       = aws_lb_target_group.this.arn_suffix
}

output "group_name" {
  description = "Auto Scaling group of the gateways."
  value       = aws_autoscaling_group.this.name
}
