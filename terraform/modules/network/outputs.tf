output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "public_subnet_ids" {
  description = "Subnets of the load balancer, one per zone."
  value       = [for zone in var.zones : aws_subnet.public[zone].id]
}

output "outgoing_address" {
  description = "The address from which hosts in private subnets are seen outside."
  value       = aws_eip.nat.public_ip
}

output "private_subnet_ids" {
  description = "Subnets of hosts and queue, one per zone."
  value       = [for zone in var.zones : aws_subnet.private[zone].id]
}
