"""moto on a free port, printed; ends with its standard input.

In moto a bucket policy's condition is never met, and what it guards is denied: a TLS-only policy locks all out. Here
a statement with a condition says nothing.
"""

import sys
from typing import Any

from moto.iam.access_control import IAMPolicyStatement, PermissionResult
from moto.server import ThreadedMotoServer

decide = IAMPolicyStatement.is_action_permitted


def unless_conditional(self: IAMPolicyStatement, *arguments: Any, **named: Any) -> PermissionResult:
    return PermissionResult.NEUTRAL if self._statement.get("Condition") else decide(self, *arguments, **named)


IAMPolicyStatement.is_action_permitted = unless_conditional  # type: ignore[method-assign]
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
