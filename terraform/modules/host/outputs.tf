output "launch_template" {
  description = "Id and newest version of the launch template."
  value = {
    id      = aws_launch_template.this.id
    version = aws_launch_template.this.latest_version
  }
}

output "security_group_id" {
  description = "Security group of the hosts."
  value       = aws_security_group.this.id
}

output "role_name" {
  description = "IAM role of the hosts."
  value       = aws_iam_role.this.name
}

output "user_data" {
  description = "What cloud-init gets."
  value       = local.user_data
}
