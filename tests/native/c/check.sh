#!/bin/sh
# Builds csrc/ with each program here and runs it: plain, under AddressSanitizer and
# UndefinedBehaviorSanitizer, under ThreadSanitizer, and under valgrind. What the machine cannot do
# is said and left out; CC chooses the compiler. Exit status 0: nothing was found.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
cc=${CC:-cc}
if ! command -v "$cc" >/dev/null; then
    echo "native-check: skipped, no C compiler ($cc)"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-std=c11 -g -O1 -fno-omit-frame-pointer -Wall -Wextra -Werror=implicit -pthread"
flags="$flags -I$root/csrc/include"
units=$(find "$root/csrc" -name '*.c')

# Libraries that the programs load: stand-ins for those of others. Built plainly, as the real ones
# are; imports read-only, as some are.
export LD_LIBRARY_PATH="$work"
for source in "$here"/lib/*.c; do
    target="$work/lib$(basename "$source" .c).so"
    "$cc" -std=c11 -g -fPIC -shared -pthread -Wl,-z,relro,-z,now "$source" -o "$target" \
        -l:libstdc++.so.6
done

works() { # flags: whether a program can be built and run with them
    echo 'int main(void) { return 0; }' >"$work/probe.c"
    # shellcheck disable=SC2086
    "$cc" $1 "$work/probe.c" -o "$work/probe" 2>/dev/null && "$work/probe" 2>/dev/null
}

build() { # kind, further flags: one executable for each program
    mkdir "$work/$1"
    for source in "$here"/*.c; do
        # shellcheck disable=SC2086
        "$cc" $flags $2 $units "$source" -o "$work/$1/$(basename "$source" .c)" -ldl
    done
}

run() { # kind, command to run it with, name for it
    for source in "$here"/*.c; do
        name=$(basename "$source" .c)
        # shellcheck disable=SC2086
        $2 "$work/$1/$name" || { echo "native-check: $name failed ($1)" >&2; exit 1; }
    done
    echo "native-check: ${3:-$1}: passed"
}

build plain ""
run plain ""

export TASKD_TEST_TOOL=1
faults=handle_segv=0:handle_abort=0:handle_sigfpe=0
export ASAN_OPTIONS="detect_stack_use_after_return=1:$faults:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS=print_stacktrace=1
if works -fsanitize=address,undefined; then
    build sanitized "-fsanitize=address,undefined -fno-sanitize-recover=all"
    run sanitized ""
else
    echo "native-check: AddressSanitizer: skipped, $cc cannot use it here"
fi
if works -fsanitize=thread; then
    build threads "-fsanitize=thread -Wno-tsan"
    # A handler of last words may look a name up, which allocates; a timer limits what that can do.
    export TSAN_OPTIONS="halt_on_error=1:die_after_fork=0:report_signal_unsafe=0:${TSAN_OPTIONS:-}"
    run threads ""
else
    echo "native-check: ThreadSanitizer: skipped, $cc cannot use it here"
fi
if command -v valgrind >/dev/null; then
    export TASKD_TEST_TOOL=valgrind
    leaks="--leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite"
    run plain "valgrind --quiet --error-exitcode=99 $leaks --fair-sched=try" valgrind
else
    echo "native-check: valgrind: skipped, it is not installed"
fi
