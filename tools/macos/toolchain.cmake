# Compiles for macOS or FreeBSD on another system, with the compiler, headers and linker of the
# package ziglang. PCCL_ZIG_TARGET: "aarch64-macos" or the like; PCCL_ZIG_TOOLS: the folder that
# tools/check_macos.sh fills.
string(REPLACE "-" ";" PCCL_ZIG_PARTS "${PCCL_ZIG_TARGET}")
list(GET PCCL_ZIG_PARTS 0 CMAKE_SYSTEM_PROCESSOR)
set(CMAKE_SYSTEM_NAME Darwin)
if(PCCL_ZIG_TARGET MATCHES "-freebsd$")
  set(CMAKE_SYSTEM_NAME FreeBSD)
endif()
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES PCCL_ZIG_TARGET PCCL_ZIG_TOOLS)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_CXX_COMPILER "${PCCL_ZIG_TOOLS}/c++")
set(CMAKE_AR "${PCCL_ZIG_TOOLS}/ar")
set(CMAKE_RANLIB "${PCCL_ZIG_TOOLS}/ranlib")
set(CMAKE_INSTALL_NAME_TOOL true)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
