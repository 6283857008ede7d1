#include "isa.h"

#include <cstdint>

#if SL_LEVEL >= SL_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sl {

#if SL_LEVEL >= SL_AMX
namespace {

constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM of arch_prctl
constexpr int kTileData = 18;               // XFEATURE_XTILEDATA

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr TileConfig kStandard;

}  // namespace

bool enable_level() { return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0; }

void amx_standard_config() { _tile_loadconfig(&kStandard); }
#else
bool enable_level() { return true; }
#endif

}  // namespace sl
