/* The median, the least and the most of what was measured several times. */
#include "profile/profile.h"

#include <assert.h>
#include <stdlib.h>

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct spread spread_of(double *values, int count) {
    assert(count >= 1);
    qsort(values, (size_t)count, sizeof *values, compare);
    double median = (values[(count - 1) / 2] + values[count / 2]) / 2;
    return (struct spread){median, values[0], values[count - 1]};
}
