# pccl from this source tree: nix-build deploy/nix
# nanobind and its backend are wheels of PyPI, because the backend has no source distribution. The
# wheel is that of CPython 3.13 on x86-64.
{
  pkgs ? import <nixpkgs> { },
}:
let
  python = pkgs.python313.pkgs;
  nanobind = python.buildPythonPackage rec {
    pname = "nanobind";
    version = "3.1.0";
    format = "wheel";
    src = pkgs.fetchPypi {
      inherit pname version format;
      dist = "py3";
      python = "py3";
      hash = "sha256-lphNvoFU/7huZTsbYKru1phccQxeda0CeeuHlDxmKS0=";
    };
  };
  nanobind-backend = python.buildPythonPackage rec {
    pname = "nanobind_backend";
    version = "1.0.0";
    format = "wheel";
    src = pkgs.fetchPypi {
      inherit pname version format;
      dist = "cp313";
      python = "cp313";
      abi = "cp313";
      platform = "manylinux_2_27_x86_64.manylinux_2_28_x86_64";
      hash = "sha256-3ix47UuI72xZqDXuvn9ekatoafF/kVphx9TuwkoeK4U=";
    };
    nativeBuildInputs = [ pkgs.autoPatchelfHook ];
    buildInputs = [ pkgs.stdenv.cc.cc.lib ];
  };
in
python.buildPythonPackage {
  pname = "pccl-collectives";
  version = "0.1.0";
  pyproject = true;
  src = pkgs.lib.cleanSource ../..;
  build-system = [
    nanobind
    python.scikit-build-core
  ];
  nativeBuildInputs = [
    pkgs.cmake
    pkgs.ninja
  ];
  dontUseCmakeConfigure = true; # scikit-build-core calls CMake
  buildInputs = [
    pkgs.asio
    pkgs.openssl
    pkgs.xxHash
  ];
  dependencies = [
    nanobind-backend
    python.numpy
    python.rich
  ];
  pythonImportsCheck = [ "pccl" ];
}
