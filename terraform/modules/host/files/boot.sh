#!/bin/bash
# First boot: release, service, logs. Whatever fails ends it, the host never reports, and it is replaced.
set -euo pipefail
source /etc/stoker/bootstrap.env
release=/opt/stoker/release

about_me() {
    local metadata=http://169.254.169.254/latest token
    token=$(curl -sf -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" "$metadata/api/token")
    curl -sf -H "X-aws-ec2-metadata-token: $token" "$metadata/meta-data/$1"
}

# Functions' own users must be able to read Python and the release.
umask 022
id "$SERVICE_USER" &>/dev/null || useradd --system --home-dir /var/lib/stoker --shell /sbin/nologin "$SERVICE_USER"
install -d -o "$SERVICE_USER" -g "$SERVICE_USER" /var/lib/stoker /var/log/stoker

command -v python3.12 &>/dev/null || dnf install -q -y python3.12
aws s3 cp --quiet --recursive "$RELEASE_URL/" "$release/"
cd "$release"
echo "$RELEASE_DIGEST  SHA256SUMS" | sha256sum --check --strict --status
sha256sum --check --strict --quiet SHA256SUMS

python3.12 -m venv /opt/stoker/venv
# Wheels of the dependencies that came with the release are used without asking an index.
offline=()
if compgen -G "wheels/*.whl" >/dev/null; then offline=(--no-index --find-links wheels); fi
/opt/stoker/venv/bin/pip install --quiet --disable-pip-version-check "${offline[@]}" -r "requirements-$([ "$ROLE" = worker ] && echo worker || echo control).txt"
/opt/stoker/venv/bin/pip install --quiet --disable-pip-version-check --no-index --no-deps ./stoker-*.whl

if [ "$ROLE" = worker ]; then
    pool=$(about_me tags/instance/stoker:pool)
    echo "STOKER_POOL=$pool" >>/etc/stoker/stoker.env
fi
systemctl daemon-reload
systemctl enable stoker.service
# A host that is put by into a warm pool starts its service when it is taken out.
if [[ $(about_me autoscaling/target-lifecycle-state || true) != Warmed:* ]]; then systemctl start stoker.service; fi

# Last, because no request waits for it.
command -v amazon-cloudwatch-agent-ctl &>/dev/null || dnf install -q -y amazon-cloudwatch-agent
/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl -a fetch-config -m ec2 -s -c file:/opt/stoker/log-agent.json
