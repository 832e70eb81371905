#include "model/model.h"
bool model_import(struct json config, struct model *model) {
    (void)model;
    json_error(config, "not there yet");
    return false;
}
