#!/bin/bash
# Before every start of the service: secrets go from Secrets Manager into memory, never onto a disk.
set -euo pipefail
source /etc/stoker/stoker.env
umask 077
: >/run/stoker/secrets.env
while read -r variable id; do
    value=$(aws secretsmanager get-secret-value --region "$AWS_REGION" --secret-id "$id" --query SecretString --output text)
    printf '%s="%s"\n' "$variable" "$value" >>/run/stoker/secrets.env
done </etc/stoker/secrets
