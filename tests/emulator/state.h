// State and functions that machine.cpp and scheduler.cpp share.
#pragma once
#include "machine.h"
#include <random>
#include <string>

namespace machine {

extern std::mt19937 random_engine;
extern std::string failed;

// Complete one pending bulk copy or cp.async arrival, chosen at random.
bool deliver_one(Block& block);

}  // namespace machine
