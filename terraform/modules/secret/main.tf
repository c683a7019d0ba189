data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  # Known before the secret exists, so that a plan shows every policy; AWS adds six characters to the name.
  arn = "arn:${data.aws_partition.current.partition}:secretsmanager:${data.aws_region.current.name}:${data.aws_caller_identity.current.account_id}:secret:${var.name}-??????"
}

# Drawn while applying, and kept nowhere but in Secrets Manager: neither in a plan nor in the state.
ephemeral "aws_secretsmanager_random_password" "this" {
  password_length     = 48
  exclude_punctuation = true
}

resource "aws_secretsmanager_secret" "this" {
  #checkov:skip=CKV_AWS_149:AWS's own key encrypts it; who may read it is three lines of IAM either way.
  #checkov:skip=CKV2_AWS_57:API keys are derived from it: a new value is a decision (raise the version), not a schedule.
  name                    = var.name
  description             = "STOKER_SECRET: API keys are derived from it"
  recovery_window_in_days = var.deletion_protection ? 30 : 0
}

resource "aws_secretsmanager_secret_version" "this" {
  secret_id                = aws_secretsmanager_secret.this.id
  secret_string_wo         = ephemeral.aws_secretsmanager_random_password.this.random_password
  secret_string_wo_version = 1
}
