"""A small ResNet in TensorFlow that saves itself and goes on. Needs `pip install tensorflow-cpu`.

    python -m taskd.rerun --max-restarts 3 -- \
        python examples/tensorflow/resnet.py --restore-path checkpoints

kill -9 of the training: it is started again, and repeats the steps since its last checkpoint.
SIGTERM, to either of them: the step is finished and saved, and the status is 2. The same command
goes on, to the weights of a run without fault. No word of taskd is in it.
"""

import argparse
import hashlib
import os
import pathlib
import signal
import sys

import tensorflow as tf

KEPT = 3
SAVED_STATUS = 2  # not done: whatever starts jobs here is to start this one again
DAMAGED = (tf.errors.OpError, ValueError, AssertionError)  # as restore() says it


def residual(inputs: tf.Tensor, filters: int, strides: int) -> tf.Tensor:
    """Two convolutions, and the way around them."""
    layers = tf.keras.layers
    inner = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(inputs)
    inner = layers.ReLU()(layers.BatchNormalization()(inner))
    inner = layers.Conv2D(filters, 3, padding="same", use_bias=False)(inner)
    inner = layers.BatchNormalization()(inner)
    if strides > 1:
        inputs = layers.Conv2D(filters, 1, strides, use_bias=False)(inputs)
    return layers.ReLU()(layers.Add()([inner, inputs]))


def resnet() -> tf.keras.Model:
    """Four blocks for images of 16 by 16 pixels in 10 classes."""
    inputs = tf.keras.Input((16, 16, 3))
    hidden = tf.keras.layers.Conv2D(8, 3, padding="same")(inputs)
    for filters, strides in ((8, 1), (16, 2), (16, 1), (32, 2)):
        hidden = residual(hidden, filters, strides)
    hidden = tf.keras.layers.GlobalAveragePooling2D()(hidden)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(10)(hidden))


def batch(step: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The samples of a step, whoever asks: a class is a brightness."""
    labels = tf.random.stateless_uniform((32,), (1, step), maxval=10, dtype=tf.int32)
    noise = tf.random.stateless_normal((32, 16, 16, 3), (2, step))
    return noise + tf.cast(labels, tf.float32)[:, None, None, None] / 5, labels


def restore(checkpoint: tf.train.Checkpoint, manager: tf.train.CheckpointManager) -> None:
    """Fill the state with the newest checkpoint that can be read; without any leave it as it is.

    Raises SystemExit if there are some and all of them are damaged: to train from the beginning
    would delete them one by one.
    """
    for path in reversed(manager.checkpoints):
        try:
            checkpoint.restore(path).assert_existing_objects_matched()
        except DAMAGED as error:
            print(f"{path} cannot be read: {str(error).splitlines()[0]}", flush=True)
        else:
            print(f"going on from step {int(checkpoint.step)} ({path})", flush=True)
            return
    if manager.checkpoints:
        sys.exit("no checkpoint can be read: give another --restore-path")
    print("starting afresh", flush=True)


def digest(variables: list[tf.Variable]) -> str:
    """Of all values, in their order."""
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in variables)).hexdigest()[:16]


def main(options: argparse.Namespace) -> int:
    """Train, and return the exit code."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    tf.keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()  # else sums depend on threads
    model, optimizer = resnet(), tf.keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)  # so that there is something to restore
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
    manager = tf.train.CheckpointManager(checkpoint, options.restore_path, max_to_keep=KEPT)
    restore(checkpoint, manager)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    while int(step) < options.steps:
        loss = train(*batch(int(step)))
        step.assign_add(1)
        print(f"pid {os.getpid()} step {int(step)} loss {float(loss):.4f}", flush=True)
        is_ending = bool(signals)
        if is_ending or int(step) % options.save_every == 0:
            path = manager.save(int(step))
        if is_ending:
            print(f"{signal.Signals(signals[0]).name}: saved as {path}", flush=True)
            return SAVED_STATUS
    print(f"final: digest {digest([*model.variables, *optimizer.variables])}", flush=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restore-path", type=pathlib.Path, default=pathlib.Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    sys.exit(main(parser.parse_args()))
