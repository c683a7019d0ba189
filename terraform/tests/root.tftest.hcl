# The whole, planned by the real provider: Terraform mocks no ephemeral resources, with which the deployment's secret is made.
# The tests let AWS_ENDPOINT_URL name a test server; in an account, a plan only reads.

provider "aws" {
  region                      = "us-east-1"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  max_retries                 = 1
}

variables {
  name            = "stoker"
  release_dir     = "../dist/release"
  certificate_arn = "arn:aws:acm:us-east-1:123456789012:certificate/1"
  domain          = "llm.example.com"
  allowed_cidrs   = ["203.0.113.0/24"]
  worker_ami_id   = "ami-0123456789abcdef0"
  gpu_pools = {
    l4 = { instance_types = ["g6.xlarge"], gpu = "L4", price_per_hour = 0.8 }
  }
}

run "everything" {
  command = plan

  assert {
    condition     = length(local.zones) == 3 && output.weights_url == "s3://stoker-weights-123456789012-us-east-1" && output.store_url == "s3://stoker-artifacts-123456789012-us-east-1/store"
    error_message = "Three zones, two buckets."
  }
  assert {
    condition     = output.worker_groups == { l4 = ["stoker-pool-l4"] } && output.role_names.workers.l4 == "stoker-pool-l4"
    error_message = "One group and one role per pool."
  }
  assert {
    condition     = alltrue([for statement in local.roles.worker.statements : !can(regex("Put|Delete|autoscaling", join(",", statement.Action))) || statement.Sid == "Write"])
    error_message = "A worker writes results and kernels, and nothing else."
  }
}

run "refuses_bad_values" {
  command = plan

  variables {
    name      = "Stoker"
    domain    = "https://llm.example.com/"
    gpu_pools = {}
    tags      = { "stoker:cluster" = "other", "a b" = "c" }
  }

  expect_failures = [var.name, var.domain, var.gpu_pools, var.tags]
}

run "refuses_a_release_that_was_not_built" {
  command = plan

  variables {
    release_dir = "."
  }

  expect_failures = [var.release_dir]
}
