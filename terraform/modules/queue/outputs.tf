output "redis_url" {
  description = "What STOKER_REDIS is on hosts: no secret in it; empty for an own server, whose URL hosts read from its secret."
  value = local.own ? "" : format(
    "rediss://%s@%s:%d?iam=%s",
    var.name,
    aws_elasticache_serverless_cache.this[0].endpoint[0].address,
    aws_elasticache_serverless_cache.this[0].endpoint[0].port,
    var.name,
  )
}

output "client_security_group_id" {
  description = "Security group that lets a host reach the queue."
  value       = aws_security_group.clients.id
}

output "client_statements" {
  description = "IAM statements that a host needs to log in."
  value = local.own ? [] : [{
    Sid      = "QueueLogin"
    Effect   = "Allow"
    Action   = ["elasticache:Connect"]
    Resource = local.arns
  }]
}

output "secrets" {
  description = "What hosts read from Secrets Manager: the URL of an own server."
  value       = local.own ? { STOKER_REDIS = { id = var.redis_url_secret_arn, arn = var.redis_url_secret_arn } } : {}
}

output "cache_name" {
  description = "Name of the cache in CloudWatch; empty for an own server."
  value       = local.own ? "" : var.name
}
