/* Names of glibc 2.38 for functions that every glibc has. The older functions do not accept binary
 * numbers ("0b101"), which nothing in the wheel reads. */

#define ALIAS(type, name, base) \
  type name(const char* text, char** end, int radix); \
  type base(const char* text, char** end, int radix); \
  type name(const char* text, char** end, int radix) { return base(text, end, radix); }

ALIAS(long, __isoc23_strtol, strtol)
ALIAS(unsigned long, __isoc23_strtoul, strtoul)
ALIAS(long long, __isoc23_strtoll, strtoll)
ALIAS(unsigned long long, __isoc23_strtoull, strtoull)
