# Worker pools: on demand, spot with its fallback, warm, and what is refused.

mock_provider "aws" {}

variables {
  cluster            = "a"
  pool               = "l4"
  private_subnet_ids = ["subnet-3", "subnet-4"]
  launch_template    = { id = "lt-0123456789abcdef0", version = "7" }
  tags               = { team = "x" }
  settings           = { instance_types = ["g6.xlarge"], gpu = "L4", gpus = 1, price_per_hour = 0.8, max_hosts = 2 }
}

run "one_type_on_demand" {
  command = plan
  module {
    source = "./modules/worker_pool"
  }
  assert {
    condition     = keys(aws_autoscaling_group.this) == ["l4"] && aws_autoscaling_group.this["l4"].name == "a-pool-l4"
    error_message = "One group."
  }
  assert {
    condition     = aws_autoscaling_group.this["l4"].min_size == 0 && aws_autoscaling_group.this["l4"].max_size == 2 && aws_autoscaling_group.this["l4"].protect_from_scale_in
    error_message = "From zero, bounded, and no host goes without the controller."
  }
  assert {
    condition = one(aws_autoscaling_group.this["l4"].initial_lifecycle_hook).name == "stoker-drain" && one(
      aws_autoscaling_group.this["l4"].initial_lifecycle_hook
    ).lifecycle_transition == "autoscaling:EC2_INSTANCE_TERMINATING"
    error_message = "A host that must go drains first."
  }
  assert {
    condition = { for tag in aws_autoscaling_group.this["l4"].tag : tag.key => tag.value } == {
      Name                    = "a-pool-l4"
      team                    = "x"
      "stoker:cluster"        = "a"
      "stoker:pool"           = "l4"
      "stoker:purchase"       = "on-demand"
      "stoker:gpu"            = "L4"
      "stoker:gpus"           = "1"
      "stoker:price-per-hour" = "0.8"
      "stoker:boot-timeout-s" = "600"
    }
    error_message = "The controller reads the pool from these tags."
  }
}

run "spot_falls_back_to_on_demand" {
  command = plan
  module {
    source = "./modules/worker_pool"
  }
  variables {
    settings = {
      instance_types = ["g6e.xlarge", "g6e.2xlarge"], gpu = "L40S", gpus = 1,
      price_per_hour = 1.86, max_hosts = 8, min_hosts = 1, spot = true, spot_price_per_hour = 0.9
    }
  }
  assert {
    condition = { for key, group in aws_autoscaling_group.this : key => group.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity } == {
      l4 = 0, l4-on-demand = 100
    }
    error_message = "A group of spot hosts, and one on demand."
  }
  assert {
    condition     = { for key, group in aws_autoscaling_group.this : key => group.min_size } == { l4 = 1, l4-on-demand = 0 }
    error_message = "The least number of hosts is kept once."
  }
  assert {
    condition     = [for override in aws_autoscaling_group.this["l4"].mixed_instances_policy[0].launch_template[0].override : override.instance_type] == ["g6e.xlarge", "g6e.2xlarge"]
    error_message = "All types, in their order."
  }
  assert {
    condition     = { for tag in aws_autoscaling_group.this["l4"].tag : tag.key => tag.value }["stoker:price-per-hour"] == "0.9"
    error_message = "The spot group has the spot price."
  }
}

run "without_fallback" {
  command = plan
  module {
    source = "./modules/worker_pool"
  }
  variables {
    settings = {
      instance_types     = ["g6e.xlarge"], gpu = "L40S", gpus = 1, price_per_hour = 1.86, max_hosts = 8, spot = true, spot_price_per_hour = 0.9,
      on_demand_fallback = false
    }
  }
  assert {
    condition     = keys(aws_autoscaling_group.this) == ["l4"]
    error_message = "One group."
  }
}

run "warm" {
  command = plan
  module {
    source = "./modules/worker_pool"
  }
  variables {
    settings = { instance_types = ["g6.xlarge"], gpu = "L4", gpus = 1, price_per_hour = 0.8, max_hosts = 2, warm_hosts = 1 }
  }
  assert {
    condition     = aws_autoscaling_group.this["l4"].warm_pool[0].pool_state == "Stopped" && aws_autoscaling_group.this["l4"].warm_pool[0].min_size == 1
    error_message = "Stopped hosts are kept."
  }
}

run "refuses_a_name" {
  command = plan
  module {
    source = "./modules/worker_pool"
  }
  variables {
    pool = "L4-on-demand"
  }
  expect_failures = [var.pool]
}

run "refuses_no_types_and_bad_bounds" {
  command = plan
  module {
    source = "./modules/worker_pool"
  }
  variables {
    settings = { instance_types = [], gpu = "L4", gpus = -1, price_per_hour = 0, min_hosts = 3, max_hosts = 2, boot_timeout_s = 1 }
  }
  expect_failures = [var.settings]
}

run "refuses_warm_spot" {
  command = plan
  module {
    source = "./modules/worker_pool"
  }
  variables {
    settings = {
      instance_types = ["g6.xlarge"], gpu = "L4", gpus = 1, price_per_hour = 0.8, max_hosts = 2, spot = true, spot_price_per_hour = 0.3, warm_hosts = 1
    }
  }
  expect_failures = [var.settings]
}

run "refuses_spot_without_a_price" {
  command = plan
  module {
    source = "./modules/worker_pool"
  }
  variables {
    settings = { instance_types = ["g6.xlarge"], gpu = "L4", gpus = 1, price_per_hour = 0.8, max_hosts = 2, spot = true }
  }
  expect_failures = [var.settings]
}
