// What torch's collectives launch besides copies, done on the host. A kernel is known by its demangled name, and its
// arguments are those of torch's templates (ATen/native/cuda: CUDALoops.cuh, Reduce.cuh, Shape.cu, CompareKernels.cu),
// which are the same in every target.
#include "kernels.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "runtime.h"

namespace bed {
namespace {

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// The text between `before` and the bracket that closes it: "FillFunctor<" of "…FillFunctor<c10::complex<float> >…".
std::string inside(const std::string& name, const std::string& before) {
  auto start = name.find(before);
  if (start == std::string::npos) return "";
  start += before.size();
  int depth = 1;
  for (auto end = start; end < name.size(); end++) {
    depth += (name[end] == '<') - (name[end] == '>');
    if (!depth) {
      auto text = name.substr(start, end - start);
      while (!text.empty() && text.back() == ' ') text.pop_back();
      return text;
    }
  }
  return "";
}

size_t size_of(const std::string& type) {
  static const struct {
    const char* name;
    size_t size;
  } SIZES[] = {
      {"bool", 1}, {"signed char", 1}, {"unsigned char", 1}, {"char", 1}, {"short", 2}, {"unsigned short", 2},
      {"int", 4}, {"unsigned int", 4}, {"long", 8}, {"unsigned long", 8}, {"float", 4}, {"double", 8},
      {"c10::Half", 2}, {"c10::BFloat16", 2}, {"c10::complex<float>", 8}, {"c10::complex<double>", 16},
      {"c10::complex<c10::Half>", 4}, {"c10::Float8_e5m2", 1}, {"c10::Float8_e4m3fn", 1},
      {"c10::Float8_e5m2fnuz", 1}, {"c10::Float8_e4m3fnuz", 1}, {"c10::Float8_e8m0fnu", 1},
  };
  for (auto& entry : SIZES)
    if (type == entry.name) return entry.size;
  return 0;
}

// Elements side by side: the vectorized kernel, or the unrolled one with offsets that are the index itself.
bool contiguous(const std::string& name) {
  return has(name, "at::native::vectorized_elementwise_kernel<") ||
         (has(name, "at::native::unrolled_elementwise_kernel<") && has(name, "TrivialOffsetCalculator<") &&
          !has(name, " OffsetCalculator<") && !has(name, "LoadWithCast") && !has(name, "StoreWithCast"));
}

// (int N, FillFunctor<T> {T value}, std::array<char*, 1> data)
std::function<void()> fill(const std::string& name, void** arguments) {
  size_t size = size_of(inside(name, "at::native::FillFunctor<"));
  if (!size || !contiguous(name)) return nullptr;
  int elements = *static_cast<int*>(arguments[0]);
  auto* value = static_cast<char*>(arguments[1]);
  auto* to = *static_cast<char**>(arguments[2]);
  return [=, bytes = std::vector<char>(value, value + size)] {
    for (long i = 0; i < elements; i++) memcpy(to + i * size, bytes.data(), size);
  };
}

// ---- What the object collectives do with sizes and pickled bytes (long and byte tensors of one dimension).

// (int N, CompareFunctor<long> {int operation}, std::array<char*, 3> {to, left, right})
std::function<void()> compare(const std::string& name, void** arguments) {
  if (inside(name, "CompareFunctor<") != "long" || !contiguous(name)) return nullptr;
  int elements = *static_cast<int*>(arguments[0]), operation = *static_cast<int*>(arguments[1]);
  auto** data = static_cast<char**>(arguments[2]);
  auto* to = reinterpret_cast<bool*>(data[0]);
  auto *left = reinterpret_cast<long*>(data[1]), *right = reinterpret_cast<long*>(data[2]);
  return [=] {
    for (int i = 0; i < elements; i++) {
      long a = left[i], b = right[i];
      to[i] = operation == 0 ? a >= b : operation == 1 ? a > b : operation == 2 ? a <= b : a < b;
    }
  };
}

// (int N, CUDAFunctorOnSelf_add<long> {long other, alpha}, std::array<char*, 2> {to, left}), and with two tensors
// (int N, CUDAFunctor_add<long> {long alpha}, std::array<char*, 3> {to, left, right})
std::function<void()> add(const std::string& name, void** arguments) {
  bool number = inside(name, "at::native::CUDAFunctorOnSelf_add<") == "long";
  bool tensor = inside(name, "at::native::CUDAFunctor_add<") == "long";
  if ((!number && !tensor) || !contiguous(name)) return nullptr;
  int elements = *static_cast<int*>(arguments[0]);
  auto* numbers = static_cast<long*>(arguments[1]);
  long other = number ? numbers[0] : 0, alpha = number ? numbers[1] : numbers[0];
  auto** data = static_cast<long**>(arguments[2]);
  auto *to = data[0], *left = data[1], *right = tensor ? data[2] : nullptr;
  return [=] {
    for (int i = 0; i < elements; i++) to[i] = left[i] + alpha * (right ? right[i] : other);
  };
}

// (T* to, {const T* from[n]; unsigned offset[n], length[n], elements[n]; …} inputs, output's shape, dimension, stride),
// a row of the grid for each input. With one dimension every variant of it means the same.
std::function<void()> concatenate(const std::string& name, dim3 grid, void** arguments) {
  constexpr char PART[] = "OpaqueType<";
  auto start = name.find("::CatArrayBatchedCopy_"), type = name.find(PART, start);
  if (start == std::string::npos || type == std::string::npos) return nullptr;
  char* rest = nullptr;
  size_t size = strtoul(name.c_str() + type + strlen(PART), &rest, 10);  // "OpaqueType<8u>, unsigned int, 1, 128, 1"
  unsigned dimensions = 0, inputs = 0, strides = 0;
  sscanf(rest, "u>, unsigned int, %u, %u, %u", &dimensions, &inputs, &strides);
  if (!size || dimensions != 1 || strides != 1 || grid.y > inputs) return nullptr;
  auto* to = *static_cast<char**>(arguments[0]);
  auto** from = static_cast<char**>(arguments[1]);
  auto* offset = reinterpret_cast<unsigned*>(from + inputs);
  auto* elements = offset + 2 * inputs;
  struct Piece {
    char *to, *from;
    size_t bytes;
  };
  std::vector<Piece> pieces;
  for (unsigned i = 0; i < grid.y; i++) pieces.push_back({to + offset[i] * size, from[i], elements[i] * size});
  return [=] {
    for (auto& piece : pieces) memcpy(piece.to, piece.from, piece.bytes);
  };
}

// at::native::ReduceOp (ATen/native/cuda/Reduce.cuh), as far as it is used here.
struct Reduction {
  struct Divider {
    unsigned divisor, magic, shift;
  };
  template <int arguments>
  struct Offsets {
    int dimensions;
    Divider sizes[25];
    unsigned strides[25][arguments];  // in bytes
  };
  char operation;
  long identity;
  int element_size, inputs, outputs, step_input, step_output, blocks, input_mult[3], output_mult[2], block_width,
      block_height, threads;
  bool vectorized;
  int output_vector;
  Offsets<1> input_offsets;
  Offsets<2> output_offsets;
  const char* from;
  char* to[2];
  void *accumulated, *between_blocks;
  int* semaphores;
  long base_index;
  bool accumulate, final_output;
};

// The sum or the largest of a whole tensor of longs.
std::function<void()> reduce(const std::string& name, void** arguments) {
  constexpr char HEAD[] = "at::native::reduce_kernel<512, 1, at::native::ReduceOp<long, at::native::func_wrapper_t<long, ";
  auto start = name.find(HEAD);
  if (start == std::string::npos) return nullptr;
  auto operation = name.substr(start + strlen(HEAD));
  bool sum = !operation.find("at::native::sum_functor<long, long, long>");
  if (!sum && operation.find("at::native::MaxNanFunctor<long>")) return nullptr;
  auto& r = *static_cast<Reduction*>(arguments[0]);
  auto* to = r.to[0];
  auto* from = r.from;
  bool one_dimension = r.outputs == 1 && r.input_offsets.dimensions <= 1 && r.element_size == sizeof(long);
  if (!one_dimension || r.accumulate || !r.final_output || place_of(from) != Place::device ||
      place_of(to) != Place::device)
    return nullptr;
  int elements = r.inputs;
  size_t stride = r.input_offsets.dimensions ? r.input_offsets.strides[0][0] : 0;
  return [=] {
    long result = 0;
    for (int i = 0; i < elements; i++) {
      long value;
      memcpy(&value, from + i * stride, sizeof value);
      result = sum ? result + value : !i || value > result ? value : result;
    }
    memcpy(to, &result, sizeof result);
  };
}

}  // namespace

std::function<void()> modelled(const std::string& name, dim3 grid, void** arguments) {
  if (auto work = fill(name, arguments)) return work;
  if (auto work = compare(name, arguments)) return work;
  if (auto work = add(name, arguments)) return work;
  if (auto work = concatenate(name, grid, arguments)) return work;
  return reduce(name, arguments);
}

}  // namespace bed
