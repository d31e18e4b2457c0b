/* Redirecting an import that lies in memory which is read-only, from several threads at once. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <pthread.h>

static void *redirect_again_and_again(void *argument)
{
    for (int i = 0; i < 300; i++)
        CHECK(taskd_names_numeric("libstandin_names.so") == 0);
    return argument;
}

int main(void)
{
    CHECK(taskd_names_numeric("libnothere.so") == -ENOENT);
    void *library = dlopen("libstandin_names.so", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    int (*standin_name)(char *, unsigned);
    *(void **)&standin_name = dlsym(library, "standin_name");
    CHECK(standin_name != NULL);

    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, redirect_again_and_again, NULL) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    char name[64] = "";
    CHECK(standin_name(name, sizeof name) == 0);
    CHECK(strcmp(name, "127.0.0.1") == 0);
    return 0;
}
