"""The lines of the document on adapting a TensorFlow script, in a TensorFlow of today.

`tf` is `tf.compat.v1`, and `tf.global_variables()` stands for `tf.contrib.slim`, which is gone. The
ResNet-50 of the document is one convolution here; what it adds to it is there to the letter.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests.tensorflow.training import LIMIT_S, Training, said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * LIMIT_S)]

SCRIPT = """
import os, signal, sys
import tensorflow
tf = tensorflow.compat.v1
tf.disable_eager_execution()
config, killed_at = {"restore_path": sys.argv[1]}, int(sys.argv[2])

images = tf.random.stateless_normal((8, 8, 8, 3), (1, 2))
kernel = tf.get_variable("resnet/conv/kernel", (3, 3, 3, 4), initializer=tf.ones_initializer())
loss = tf.reduce_mean(tf.square(tf.nn.conv2d(images, kernel, strides=1, padding="SAME")))
step = tf.train.get_or_create_global_step()
train = tf.train.MomentumOptimizer(0.01, 0.9).minimize(loss, global_step=step)

variables_to_restore = tf.global_variables()
restore_path = config.get("restore_path", "")
if restore_path and os.path.exists(restore_path):
    print(f"load pre-trained model from: {restore_path}", flush=True)
    pairs = {v.name.split(':')[0]: v for v in variables_to_restore}
    tf.train.init_from_checkpoint(restore_path, pairs)

saver = tf.train.Saver()
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    now = int(session.run(step))
    print(f"begins at step {now}", flush=True)
    while now < 12:
        session.run(train)
        now = int(session.run(step))
        if now == killed_at and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if now % 5 == 0:
            os.makedirs(restore_path, exist_ok=True)
            saver.save(session, os.path.join(restore_path, "model"), global_step=now)
    print("final:", now, float(session.run(loss)).hex(), session.run(kernel).tobytes().hex())
"""


def trained(training: Training, name: str, killed_at: int) -> str:
    """What the script prints under taskd.rerun, with checkpoints in the folder `name`."""
    (training.folder / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "taskd.rerun", "--max-restarts=1", "--"]
    arguments = [str(training.folder / "script.py"), name, str(killed_at)]
    finished = training.execute([*launcher, sys.executable, *arguments]).end()
    assert finished.returncode == 0, finished.output[-6000:]
    return finished.output


def test_init_from_checkpoint_goes_on_after_a_kill(training: Training) -> None:
    clean, hurt = trained(training, "clean", -1), trained(training, "hurt", 8)
    assert said(clean) == []
    assert said(hurt) == ["taskd: the command ended with SIGKILL: restart 1 of 1"]
    assert re.findall(r"begins at step \d+", clean) == ["begins at step 0"]
    assert re.findall(r"begins at step \d+", hurt) == ["begins at step 0", "begins at step 5"]
    assert hurt.count("load pre-trained model from: hurt") == 1
    (final,) = re.findall(r"^final: .*", clean, re.MULTILINE)
    assert re.findall(r"^final: .*", hurt, re.MULTILINE) == [final]
