output "reference" {
  description = "Under what name a host asks for it, and the ARN that its role needs."
  value       = { id = aws_secretsmanager_secret.this.name, arn = local.arn }
}
