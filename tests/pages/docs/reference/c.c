// Names that the page's fragment takes for granted.
#include <pccl.h>
#include <stdbool.h>
#include <stdio.h>

static pcclSharedState_t state;
static uint64_t steps;
static size_t count;
static float *gradient, *mean;

int main(void) {
#include "block.inc"
}
