// Uncaught exceptions for tests/native/test_last_words.py.
#include <stdexcept>

namespace faults {
struct Worst {
};
} // namespace faults

extern "C" void crash_throw()
{
    throw std::runtime_error("nobody takes it");
}

extern "C" void crash_throw_own()
{
    throw faults::Worst();
}
