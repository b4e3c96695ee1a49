# SPDX-License-Identifier: Apache-2.0
"""A child of the ring tests: reader number 0 sends every message back reversed."""

import sys

from glmserve.ipc.process import watch_heartbeat
from glmserve.ipc.ring import BroadcastRing

plan_fd, reader, result_fd, heartbeat_fd = map(int, sys.argv[1:])
watch_heartbeat(heartbeat_fd)
plans = BroadcastRing.attach_reader(plan_fd, reader)
results = BroadcastRing.attach_writer(result_fd) if result_fd >= 0 else None
while True:
    message = plans.recv()
    if results is not None:
        results.send(message[::-1])
