/* disagmoe profile --links: all pairs of ranks as a table of the slow ones, or as JSON lines. */
#include "cli/profile.h"

#include <stdlib.h>
#include <string.h>

enum { SLOW_PAIRS = 20 };
/* Below this part of the median of its kind a pair is slow. */
static const double SLOW = 0.8;

struct links {
    struct link *list;
    int count;
    const char **hosts;
};

static bool same_host(const struct links *links, const struct link *link) {
    return strcmp(links->hosts[link->a], links->hosts[link->b]) == 0;
}

/* Medians over all pairs inside a host, or between hosts. False where there are none. */
static bool medians(const struct links *links, bool inside, double *bytes_per_s, double *latency_s) {
    double *rates = must_alloc(2 * ((size_t)links->count + 1) * sizeof *rates), *times = rates + links->count;
    int count = 0;
    for (int i = 0; i < links->count; i++)
        if (same_host(links, &links->list[i]) == inside) {
            rates[count] = links->list[i].bytes_per_s.median;
            times[count++] = links->list[i].latency_s.median;
        }
    if (count) {
        *bytes_per_s = spread_of(rates, count).median;
        *latency_s = spread_of(times, count).median;
    }
    free(rates);
    return count > 0;
}

static void print_links_json(const struct links *links, int repeats) {
    for (int i = 0; i < links->count; i++) {
        const struct link *link = &links->list[i];
        cJSON *line = cJSON_CreateObject();
        json_add_number(line, "a", link->a);
        json_add_number(line, "b", link->b);
        cJSON_AddStringToObject(line, "host_a", links->hosts[link->a]);
        cJSON_AddStringToObject(line, "host_b", links->hosts[link->b]);
        json_add_number(line, "bytes_per_s", link->bytes_per_s.median);
        json_add_number(line, "bytes_per_s_low", link->bytes_per_s.low);
        json_add_number(line, "bytes_per_s_high", link->bytes_per_s.high);
        json_add_number(line, "latency_s", link->latency_s.median);
        json_add_number(line, "latency_s_low", link->latency_s.low);
        json_add_number(line, "latency_s_high", link->latency_s.high);
        json_add_number(line, "message_bytes", LINK_BYTES);
        json_add_number(line, "repeats", repeats);
        print_json_line(line, stdout);
    }
}

static int by_speed(const void *a, const void *b) {
    double x = ((const struct link *)a)->bytes_per_s.median, y = ((const struct link *)b)->bytes_per_s.median;
    return (x > y) - (x < y);
}

static void print_pair(const struct links *links, const struct link *link, double median) {
    char rate[16], low[16], high[16];
    printf("%6d %-18.18s %6d %-18.18s %7s/s %6.1f us %3.0f %%\n", link->a, links->hosts[link->a], link->b,
           links->hosts[link->b], bytes_text(link->bytes_per_s.median, rate), link->latency_s.median * 1e6,
           100 * link->bytes_per_s.median / median);
    if (link->bytes_per_s.high > 2 * link->bytes_per_s.low)
        printf("%49s/s to %s/s\n", bytes_text(link->bytes_per_s.low, low),
               bytes_text(link->bytes_per_s.high, high));
}

/* Pairs of one kind: how fast they are, and which are slow, the slowest first. */
static void print_kind(struct links *links, bool inside) {
    double bytes_per_s, latency_s;
    char rate[16];
    if (!medians(links, inside, &bytes_per_s, &latency_s)) return;
    qsort(links->list, (size_t)links->count, sizeof *links->list, by_speed);
    int pairs = 0, slow = 0;
    for (int i = 0; i < links->count; i++) {
        const struct link *link = &links->list[i];
        if (same_host(links, link) != inside) continue;
        pairs++;
        slow += link->bytes_per_s.median < SLOW * bytes_per_s;
    }
    printf("%s: %d pair%s, median %s/s, %.1f us\n", inside ? "inside a host" : "between hosts", pairs,
           pairs > 1 ? "s" : "", bytes_text(bytes_per_s, rate), latency_s * 1e6);
    if (!slow) {
        printf("  none below %.0f %% of the median\n", 100 * SLOW);
        return;
    }
    printf("  %d below %.0f %% of the median%s:\n%6s %-18s %6s %-18s %9s %9s %5s\n", slow, 100 * SLOW,
           slow > SLOW_PAIRS ? ", the slowest" : "", "rank", "host", "rank", "host", "bandwidth", "latency",
           "part");
    int shown = 0;
    for (int i = 0; i < links->count && shown < SLOW_PAIRS; i++)
        if (same_host(links, &links->list[i]) == inside &&
            links->list[i].bytes_per_s.median < SLOW * bytes_per_s) {
            print_pair(links, &links->list[i], bytes_per_s);
            shown++;
        }
}

int measure_links(const struct profile *profile, MPI_Comm world, int rank, int ranks) {
    struct links links = {0};
    if (ranks < 2) {
        fprintf(stderr, "disagmoe: profile: --links: found 1 rank; a link needs 2\n");
        return STATUS_USAGE;
    }
    links.hosts = link_hosts(profile->arena, world);
    links.list = links_measure(world, profile->repeats, &links.count);
    if (rank == 0 && profile->options.json) print_links_json(&links, profile->repeats);
    if (rank == 0 && !profile->options.json) {
        printf("%d ranks, all pairs in %d rounds, those of a round at once. One way: messages\n"
               "of %d MiB, latency of one byte; medians of %d\n",
               ranks, link_rounds(ranks), LINK_BYTES >> 20, profile->repeats);
        print_kind(&links, false);
        print_kind(&links, true);
    }
    free(links.list);
    return STATUS_DONE;
}
