output "dns_name" {
  description = "Name of the load balancer: point your domain at it with a CNAME or an alias record."
  value       = module.gateway.dns_name
}

output "zone_id" {
  description = "Route 53 zone of the load balancer, for the alias record."
  value       = module.gateway.zone_id
}

output "root_key_command" {
  description = "Prints the operator's API key, with which tenants are made. The key itself is in no output and no state."
  value       = "STOKER_SECRET=$(aws secretsmanager get-secret-value --region ${local.region} --secret-id ${module.secret.reference.id} --query SecretString --output text) stoker tenants root-key"
}

output "weights_url" {
  description = "Where models are published: `stoker push MODEL <weights_url>/NAME`, and `weights=` of `app.llm`."
  value       = "s3://${module.weights.name}"
}

output "store_url" {
  description = "STOKER_STORE of the deployment: code bundles and big payloads."
  value       = local.environment.STOKER_STORE
}

output "redis_url" {
  description = "STOKER_REDIS of the deployment; empty for an own server."
  value       = module.queue.redis_url
}

output "release" {
  description = "Digest of the release that new hosts install."
  value       = local.release.digest
}

output "worker_groups" {
  description = "Auto Scaling groups of each pool, the cheapest first."
  value       = { for pool, module in module.worker_pool : pool => module.group_names }
}

output "role_names" {
  description = "IAM roles of gateway, controller and of each pool's workers: let the latter read buckets with weights of your own."
  value = {
    gateway    = module.gateway_host.role_name
    controller = module.controller_host.role_name
    workers    = { for pool, module in module.worker_host : pool => module.role_name }
  }
}

output "log_groups" {
  description = "CloudWatch log group of each role."
  value       = { for role, group in module.observability.log_groups : role => group.name }
}

output "dashboard_url" {
  description = "The dashboard in the console."
  value       = module.observability.dashboard_url
}
