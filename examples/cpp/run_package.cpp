// Runs an AOTInductor package that holds softcap_ops operators from C++: run_package model.pt2
//
// The operators' schemas and their choice of a kernel are Python code, so the program needs an interpreter in it; once
// softcap_ops is imported there, packages load and run as any other. Without one PyTorch says "Could not find schema
// for softcap_ops::attention_fwd" (pytorch/pytorch#134581, #143786).
//
//   TORCH=$(python -c 'import torch, os; print(os.path.dirname(torch.__file__))')
//   g++ -std=c++20 run_package.cpp $(python3-config --includes --ldflags --embed) \
//       -isystem $TORCH/include -L$TORCH/lib -Wl,-rpath,$TORCH/lib -ltorch -ltorch_cpu -ltorch_python -lc10
#include <Python.h>

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <exception>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: run_package model.pt2\n";
    return 2;
  }
  Py_Initialize();
  if (PyRun_SimpleString("import softcap_ops") != 0) return 3;
  PyEval_SaveThread();  // the operators take the interpreter's lock themselves, on whichever thread they run
  try {
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const auto out = model.run({at::ones({2, 9, 32})});
    std::cout << "sum " << out[0].sum().item<double>() << std::endl;
  } catch (const std::exception& error) {
    std::cout << error.what() << std::endl;
    return 1;
  }
  return 0;
}
