/*
The paper's own system: the ring of A- and F-groups (ring.c). Its roofline allocation joins it here.
*/
#ifndef DISAGMOE_H
#define DISAGMOE_H

#include "plan/plan.h"

extern const struct system disagmoe;

#endif
