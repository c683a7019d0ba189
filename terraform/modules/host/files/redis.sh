#!/bin/bash
# Before every start of the service: the URL of an own queue server goes from its secret into memory, never onto a disk.
set -euo pipefail
source /etc/stoker/bootstrap.env
if [ -z "$REDIS_SECRET" ]; then exit 0; fi
source /etc/stoker/stoker.env
umask 077
url=$(aws secretsmanager get-secret-value --region "$AWS_REGION" --secret-id "$REDIS_SECRET" --query SecretString --output text)
printf 'STOKER_REDIS=%s\n' "$url" >/run/stoker/redis.env
