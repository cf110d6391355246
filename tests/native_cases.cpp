// Runs step.cpp on cases from a file and compares the logits with what Python expected; see test_native_processors.py.
//
//     native_cases          prints the most rows of a panel of each kind of weights
//     native_cases FILE     prints a line for each case that differs, and exits with 1 if one did

#include "step.cpp"

extern "C" const char *gptworks_error() noexcept; // entry.cpp

#include <cstdio>
#include <cstdlib>

namespace {

struct Header { // of a case; positions are bytes in its image
    int64_t image_bytes, n_relocations, model, tensors, expected, n_logits;
    double near, near_rounded; // largest difference; where activations are rounded to multiply them
    int64_t kind;              // of the weights
    char name[64];
};

template<class T> void read(std::FILE *file, T *to, int64_t n) {
    if (std::fread(to, sizeof(T), n, file) != (size_t)n) {
        std::fprintf(stderr, "the file ends too early\n");
        std::exit(2);
    }
}

bool agrees(std::FILE *file) {
    Header h;
    read(file, &h, 1);
    std::vector<Lanes> image(h.image_bytes / 64 + 1024); // aligned; prefetching goes on behind the end
    char *base = (char *)image.data();
    std::vector<int64_t> relocations(h.n_relocations);
    read(file, base, h.image_bytes);
    read(file, relocations.data(), h.n_relocations);
    for (const int64_t at : relocations) { // a pointer is kept as a position
        int64_t position;
        std::memcpy(&position, base + at, sizeof position);
        char *pointer = base + position;
        std::memcpy(base + at, &pointer, sizeof pointer);
    }
    const Tensor *const tensors = (const Tensor *)(base + h.tensors);
    if (gptworks_step((const Model *)(base + h.model), tensors, tensors + 1, tensors + 2, tensors + 3, tensors + 4,
                      nullptr, 2)) {
        std::printf("%s: %s\n", h.name, gptworks_error());
        return false;
    }
    const float *logits = tensors[4].as<float>();
    const int built = gptworks_built_with();
    const bool rounded = h.kind == BF16 ? built & 16 : (h.kind == INT8 || h.kind == INT4) && built & 40;
    const double near = rounded ? h.near_rounded : h.near;
    const float *expected = (const float *)(base + h.expected);
    double worst = 0;
    for (int64_t i = 0; i < h.n_logits; i++) {
        const bool same = std::isnan(expected[i]) == std::isnan(logits[i]);
        const double difference = std::isnan(expected[i]) ? 0 : std::abs((double)expected[i] - logits[i]);
        worst = std::max(worst, same ? difference : INFINITY);
    }
    if (worst <= near) return true;
    std::printf("%s: a logit differs by %g, and at most %g is allowed\n", h.name, worst, near);
    return false;
}

} // namespace

int main(int n_arguments, char **arguments) {
    if (n_arguments == 1) {
        for (int64_t kind = FP32; kind <= INT4; kind++) std::printf("%lld\n", (long long)widest_panel(kind));
        return 0;
    }
    std::FILE *file = std::fopen(arguments[1], "rb");
    if (!file) return 2;
    int64_t n_cases, n_wrong = 0;
    read(file, &n_cases, 1);
    for (int64_t i = 0; i < n_cases; i++) n_wrong += !agrees(file);
    std::printf("%lld cases, %lld wrong, built with %d\n", (long long)n_cases, (long long)n_wrong,
                gptworks_built_with());
    return n_wrong > 0;
}
