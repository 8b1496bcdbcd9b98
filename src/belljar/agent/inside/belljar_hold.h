/* Hold a program, as belljar_hold.py tells: int n = belljar_hold(&argv) in main, once all is loaded; n arguments of the job, or -1. */
#include <fcntl.h>
#include <grp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static int belljar_hold(char ***argv) {
    struct sockaddr_un place = {AF_UNIX, "/run/belljar/hold.sock"};
    char rights[CMSG_SPACE(3 * sizeof(int))], *data = (char *)malloc(1 << 24), *at = data, *name, *cwd;
    struct iovec room = {data, (1 << 24) - 1};
    struct msghdr message = {.msg_iov = &room, .msg_iovlen = 1, .msg_control = rights, .msg_controllen = sizeof rights};
    int line = socket(AF_UNIX, SOCK_STREAM, 0), files[3], number, count, uid, gid;
    ssize_t size, more;
    if (!data || connect(line, (struct sockaddr *)&place, sizeof place) || (size = recvmsg(line, &message, 0)) < 4) return -1;
    if (strncmp(data, "job", 4) || !CMSG_FIRSTHDR(&message)) return -1;
    memcpy(files, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof files);
    while ((more = read(line, data + size, (1 << 24) - 1 - size)) > 0) size += more;
    data[size] = 0;
    close(line);
#define NEXT (at += strlen(at) + 1)
    name = NEXT;
    for (number = 0; number < 3; number++) {
        dup2(files[number], number);
        close(files[number]);
        if (name[number] == 'c') close(number);
    }
    umask(atoi(NEXT));
    cwd = NEXT;
    uid = atoi(NEXT), gid = atoi(NEXT);
    gid_t groups[(count = atoi(NEXT)) + 1];
    for (number = 0; number < count; number++) groups[number] = atoi(NEXT);
    if (!geteuid() && (setgroups(count, groups) || setgid(gid) || setuid(uid))) return -1;
    if (chdir(cwd)) return -1;
    for (number = atoi(NEXT); number > 0; number--) NEXT; /* limits: set those you need by setrlimit */
    *argv = (char **)calloc((count = atoi(NEXT)) + 1, sizeof **argv);
    for (number = 0; number < count; number++) (*argv)[number] = NEXT;
    clearenv();
    for (number = atoi(NEXT); number > 0; number -= 2) name = NEXT, setenv(name, NEXT, 1);
    return count;
}
